#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "pinflow/formats/npy.hpp"
#include "pinflow/load.hpp"
#include "tests/api/load/stored_orders.hpp"
#include "tests/load_backend.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

// Loads to a GPU that casts the elements, swaps their bytes, and puts them into C order.

using namespace pinflow;

namespace {

const std::vector<std::string> float_types{"<f2", "bfloat16", "<f4", "<f8", "float8_e4m3fn", "float8_e5m2"};

/// Small and large tensors of every type, with any bits.
std::vector<model_tensor> tensors_of_all_types() {
    std::vector<model_tensor> tensors;
    for (const std::string& type : float_types) {
        tensors.push_back(random_tensor("small " + type, dtype::parse(type), {7, 11}));
        tensors.push_back(random_tensor("middle " + type, dtype::parse(type), {301, 999}));
        tensors.push_back(random_tensor("large " + type, dtype::parse(type), {1301, 999}));
        tensors.push_back(random_tensor("one " + type, dtype::parse(type), {}));
    }
    tensors.push_back(random_tensor("integer", dtype::of<std::int32_t>(), {5, 6}));
    return tensors;
}

}  // namespace

TEST_CASE("load: the device casts floats, with the bits of the host") {
    const temporary_folder folder;
    write_model(folder / "a.safetensors", tensors_of_all_types());
    const tensor_files files({folder / "a.safetensors"});
    for (const std::string& type : float_types) {
        CAPTURE(type);
        std::vector<tensor_request> requests;
        for (const tensor_description& each : files.tensors()) {
            requests.push_back({.name = each.name});
            if (each.name != "integer") requests.back().dtype = dtype::parse(type);
            const std::size_t kind =
                requests.size() % 3;  // each size is whole for some types, cut for others
            if (each.shape.size() != 2 || kind == 0) continue;
            requests.back().slice = tensor_slice{kind - 1, 1, each.shape[kind - 1] - 3};
        }
        load_backend& backend = new_backend();
        const loaded_tensors expected = files.load(requests, device::host());
        const loaded_tensors loaded = files.load(requests, backend.device());
        CHECK(loaded.report.staged_bytes + loaded.report.copied_bytes == expected.report.size_bytes);
        std::uint64_t elements = 0;
        for (std::size_t i = 0; i < requests.size(); ++i) {
            CAPTURE(requests[i].name);
            const device_tensor& tensor = loaded.tensors[i];
            CHECK(tensor.dtype() == expected.tensors[i].dtype());
            CHECK(bytes_of(tensor) == bytes_of(expected.tensors[i]));
            if (!(files.tensor(requests[i].name).dtype == tensor.dtype()))
                elements += tensor.size_bytes() / tensor.dtype().size_bytes();
        }
        CHECK(backend.converted_elements == elements);
        CHECK(backend.wrong_conversions == 0);
    }
}

TEST_CASE("load: the host casts what the device cannot") {
    const temporary_folder folder;
    const auto floats = random_tensor("floats", dtype::of<float>(), {301, 999});
    const auto integers = random_tensor("integers", dtype::of<std::int16_t>(), {301, 999});
    write_model(folder / "a.safetensors", std::vector{floats, integers});
    const tensor_files files({folder / "a.safetensors"});
    load_backend& backend = new_backend();
    std::vector<std::byte> memory(301 * 999 * sizeof(double) + 1);
    std::vector<tensor_request> requests{
        {.name = "floats", .dtype = dtype::of<double>(), .destination = memory.data() + 1},  // misaligned
        {.name = "integers", .dtype = dtype::of<float>()}};
    const loaded_tensors loaded = files.load(requests, backend.device());
    CHECK(backend.converted_elements == 0);
    requests[0].destination = nullptr;
    const loaded_tensors expected = files.load(requests, device::host());
    CHECK(std::vector(memory.begin() + 1, memory.end()) == bytes_of(expected.tensors[0]));
    CHECK(bytes_of(loaded.tensors[1]) == bytes_of(expected.tensors[1]));
}

TEST_CASE("load: the device swaps bytes and reorders elements") {
    const temporary_folder folder;
    for (const char* const type : {"<f4", "<i2", "|u1", "<c16", "<U1", "<M8[s]"}) {
        CAPTURE(type);
        const std::vector<model_tensor> tensors{
            random_tensor("small", dtype::parse(type), {3, 5, 2, 7}),
            random_tensor("large", dtype::parse(type), {sanitized ? 101 : 301, 2, 1301})};
        for (const stored_order& order : changed_orders) {
            for (const model_tensor& tensor : tensors) {
                write_npy(folder / (tensor.name + ".npy"), stored_model_tensor(tensor, order).view());
                const tensor_files files({folder / (tensor.name + ".npy")});
                for (const tensor_request& request : requests_of(tensor)) {
                    CAPTURE(request.slice ? static_cast<int>(request.slice->axis) : -1);
                    load_backend& backend = new_backend();
                    const loaded_tensors loaded = files.load({&request, 1}, backend.device());
                    CHECK(bytes_of(loaded.tensors[0]) == part_of(tensor, request));
                    const bool is_changed = order.is_fortran_order || tensor.dtype.size_bytes() > 1;
                    const std::uint64_t count = element_count(loaded.tensors[0].shape());
                    CHECK(backend.converted_elements == (is_changed ? count : 0));
                    CHECK(backend.wrong_conversions == 0);
                }
            }
        }
    }
}

TEST_CASE("load: the host reorders and swaps what the device cannot") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{
        random_tensor("three words", dtype::parse("<U3"), {31, 57}),
        random_tensor("long doubles", dtype(dtype_kind::floating, 16), {31, 57}),
        random_tensor("nine axes", dtype::of<float>(), {2, 2, 2, 2, 2, 2, 2, 2, 2})};
    for (const model_tensor& tensor : tensors) {
        CAPTURE(tensor.name);
        write_npy(folder / "a.npy", stored_model_tensor(tensor, {true, true}).view());
        load_backend& backend = new_backend();
        const loaded_tensors loaded = load_tensors(std::vector{folder / "a.npy"}, backend.device());
        CHECK(bytes_of(loaded.tensors[0]) == tensor.bytes);
        CHECK(backend.converted_elements == 0);
    }
}
