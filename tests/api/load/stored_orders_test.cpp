#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "devices.hpp"
#include "model_files.hpp"
#include "pinflow/formats/npy.hpp"
#include "sanitized.hpp"
#include "stored_orders.hpp"
#include "temporary_folder.hpp"

// Tensors that are stored in Fortran order, or big-endian.

using namespace pinflow;

namespace {

std::vector<model_tensor> tensors_to_store() {
    std::vector<model_tensor> tensors;
    for (const char* const type : {"<f4", "<f8", "<i2", "<c16", "<U3", "<c8", "<U1", "<f2", "<M8[s]"}) {
        if (sanitized && std::string_view(type) == "<c8") break;  // the rest has elements of these sizes
        const auto add = [&](const std::string& name, const shape_vector& shape) {
            tensors.push_back(
                random_tensor(std::to_string(tensors.size()) + name, dtype::parse(type), shape));
        };
        add("two", {7, 11});
        add("four", {5, 1, 3, 2});
        add("long", {40, 3, 300});
        add("nine", {2, 2, 2, 2, 2, 2, 2, 2, 3});
        add("eight", {2, 1, 3, 2, 2, 2, 2, 2, 3});
        add("none", {0, 4});
        add("flat", {1, 9});
    }
    tensors.push_back(random_tensor("bytes", dtype::of<std::uint8_t>(), {1201, 1301}));
    tensors.push_back(random_tensor("large", dtype::of<float>(), {1301, 1499}));
    tensors.push_back(random_tensor("wide", dtype::of<double>(), {3, 400'001}));
    tensors.push_back(random_tensor("tall", dtype::of<float>(), {200'001, 7}));
    return tensors;
}

/// Writes a .npy file of each tensor.
std::vector<std::filesystem::path> write_all(const temporary_folder& folder,
                                             const std::vector<model_tensor>& tensors,
                                             const stored_order& order) {
    std::vector<std::filesystem::path> files;
    for (const model_tensor& tensor : tensors) {
        files.push_back(folder / (tensor.name + ".npy"));
        write_npy(files.back(), stored_model_tensor(tensor, order).view());
    }
    return files;
}

}  // namespace

TEST_CASE("load: tensors in Fortran order and big-endian ones are loaded in C order and little-endian") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors = tensors_to_store();
    for (const stored_order& order : changed_orders) {
        const std::vector<std::filesystem::path> files = write_all(folder, tensors, order);
        const tensor_files opened(files);
        on_each_device([&](const device& device) {
            const loaded_tensors all = load_tensors(files, device);
            for (const model_tensor& tensor : tensors) {
                CAPTURE(tensor.name);
                CAPTURE(tensor.dtype.descr());
                CHECK(all[tensor.name].dtype() == tensor.dtype);
                CHECK(all[tensor.name].shape() == tensor.shape);
                CHECK(bytes_of(all[tensor.name]) == tensor.bytes);
                for (const tensor_request& request : requests_of(tensor)) {
                    CAPTURE(request.slice ? static_cast<int>(request.slice->axis) : -1);
                    CAPTURE(request.further_slices.size());
                    const loaded_tensors one = opened.load({&request, 1}, device);
                    CHECK(bytes_of(one.tensors[0]) == part_of(tensor, request));
                }
            }
        });
    }
}

TEST_CASE("load: tensors in Fortran order and big-endian ones are cast as others are") {
    const temporary_folder folder;
    std::vector<model_tensor> tensors;
    for (const char* const type : {"<f2", "<f4", "<f8", "<i4"})
        tensors.push_back(
            random_tensor(std::string(type).substr(1), dtype::parse(type), {sanitized ? 101 : 611, 977}));
    write_model(folder / "expected.safetensors", tensors);
    const tensor_files plain({folder / "expected.safetensors"});
    for (const stored_order& order : changed_orders) {
        const std::vector<std::filesystem::path> files = write_all(folder, tensors, order);
        const tensor_files opened(files);
        on_each_device([&](const device& device) {
            for (const char* const type : {"<f4", "<f8", "bfloat16"}) {
                for (std::size_t axis = 0; axis < 2; ++axis) {
                    std::vector<tensor_request> requests;
                    for (const model_tensor& tensor : tensors)
                        requests.push_back({.name = tensor.name,
                                            .slice = tensor_slice{axis, 5, tensor.shape[axis] - 6},
                                            .dtype = dtype::parse(type)});
                    const loaded_tensors expected = plain.load(requests, device::host());
                    const loaded_tensors loaded = opened.load(requests, device);
                    for (std::size_t i = 0; i < requests.size(); ++i) {
                        CAPTURE(requests[i].name);
                        CAPTURE(type);
                        CHECK(bytes_of(loaded.tensors[i]) == bytes_of(expected.tensors[i]));
                    }
                }
            }
        });
    }
}

TEST_CASE("load: tensors in Fortran order and big-endian ones are loaded to a misaligned destination") {
    const temporary_folder folder;
    const model_tensor tensor = random_tensor("large", dtype::of<double>(), {301, 499});
    for (const stored_order& order : changed_orders) {
        write_npy(folder / "large.npy", stored_model_tensor(tensor, order).view());
        const tensor_files opened({folder / "large.npy"});
        on_each_device([&](const device& device) {
            const stream stream(device);
            const device_buffer memory(tensor.bytes.size() + 1, stream);
            stream.synchronize();
            const std::vector<tensor_request> requests{{.name = "large", .destination = memory.data() + 1}};
            static_cast<void>(opened.load(requests, device));
            std::vector<std::byte> bytes(tensor.bytes.size());
            copy_to_host_async(bytes, memory.data() + 1, stream);
            stream.synchronize();
            CHECK(bytes == tensor.bytes);
        });
    }
}
