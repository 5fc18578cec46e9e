#include <doctest/doctest.h>
#include <hdf5.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/load.hpp"
#include "tests/api/load/stored_orders.hpp"
#include "tests/load_backend.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

// Loads of chunked HDF5 datasets, which several threads decode in parts or in boxes.

using namespace pinflow;

namespace {

/// The rows that were written; the others are the fill value, 0.
enum class written : std::uint8_t { all, first_half, nothing };

/// How a dataset of 32-bit floats is stored.
struct storage {
    std::vector<std::uint64_t> chunk;
    bool is_deflated = false;
    bool is_big_endian = false;
    written content = written::all;
};

void write_dataset(const std::filesystem::path& path, const model_tensor& tensor, const storage& how) {
    const auto rank = static_cast<int>(tensor.shape.size());
    const std::vector<::hsize_t> shape(tensor.shape.begin(), tensor.shape.end());
    const std::vector<::hsize_t> chunk(how.chunk.begin(), how.chunk.end());
    const ::hid_t file = ::H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    const ::hid_t space = ::H5Screate_simple(rank, shape.data(), nullptr);
    const ::hid_t creation = ::H5Pcreate(H5P_DATASET_CREATE);
    REQUIRE(::H5Pset_chunk(creation, rank, chunk.data()) >= 0);
    if (how.is_deflated) REQUIRE(::H5Pset_deflate(creation, 1) >= 0);
    const ::hid_t type = how.is_big_endian ? H5T_IEEE_F32BE : H5T_IEEE_F32LE;
    const ::hid_t dataset =
        ::H5Dcreate2(file, tensor.name.c_str(), type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    REQUIRE(dataset >= 0);
    const std::vector<::hsize_t> first(shape.size(), 0);
    std::vector<::hsize_t> count = shape;
    if (how.content == written::first_half) count[0] /= 2;
    REQUIRE(::H5Sselect_hyperslab(space, H5S_SELECT_SET, first.data(), nullptr, count.data(), nullptr) >= 0);
    if (how.content != written::nothing)
        REQUIRE(::H5Dwrite(dataset, H5T_IEEE_F32LE, space, space, H5P_DEFAULT, tensor.bytes.data()) >= 0);
    ::H5Dclose(dataset);
    ::H5Pclose(creation);
    ::H5Sclose(space);
    ::H5Fclose(file);
}

/// A tensor of floats that can be compressed.
model_tensor floats_of(const shape_vector& shape) {
    model_tensor tensor{"data", dtype::of<float>(), shape, {}};
    tensor.bytes.resize(element_count(shape) * sizeof(float));
    for (std::size_t i = 0; i < tensor.bytes.size() / sizeof(float); ++i) {
        const auto value = static_cast<float>((i * 2654435761U >> 16U) % 256);
        std::memcpy(tensor.bytes.data() + i * sizeof(float), &value, sizeof value);
    }
    return tensor;
}

std::vector<std::byte> as_doubles(std::span<const std::byte> floats) {
    std::vector<std::byte> doubles(2 * floats.size());
    for (std::size_t i = 0; i < floats.size() / sizeof(float); ++i) {
        float value = 0;
        std::memcpy(&value, floats.data() + i * sizeof value, sizeof value);
        const double wide = value;
        std::memcpy(doubles.data() + i * sizeof wide, &wide, sizeof wide);
    }
    return doubles;
}

/// Loads the tensor and slices of it, with and without a cast, to both devices, and checks them.
void check_loads(const std::filesystem::path& path, const model_tensor& tensor, bool is_in_boxes) {
    const tensor_files files({path});
    for (tensor_request request : requests_of(tensor)) {
        CAPTURE(request.slice ? static_cast<int>(request.slice->axis) : -1);
        CAPTURE(request.further_slices.size());
        const auto expected = part_of(tensor, request);
        load_backend& backend = new_backend();
        for (const device& device : {device::host(), backend.device()}) {
            CAPTURE(device.name());
            CHECK(bytes_of(files.load({&request, 1}, device).tensors[0]) == expected);
        }
        CHECK(backend.wrong_conversions == 0);
        if (expected.size() == tensor.bytes.size())
            CHECK((backend.converted_elements == expected.size() / sizeof(float)) == is_in_boxes);
        if (sanitized && request.slice) continue;  // whole tensors and boxes are cast
        request.dtype = dtype::parse("<f8");
        for (const device& device : {device::host(), backend.device()})
            CHECK(bytes_of(files.load({&request, 1}, device).tensors[0]) == as_doubles(expected));
    }
}

}  // namespace

TEST_CASE("load: chunked datasets are loaded, whatever the shapes of chunks and dataset are") {
    const temporary_folder folder;
    struct example {
        shape_vector shape;
        std::vector<std::uint64_t> chunk;
        bool is_in_boxes;
    };
    const std::vector<example> examples{
        {{3'000'000}, {70'000}, false},
        {{3'000'000}, {2'000'000}, false},  // larger than a staging buffer
        {{5000, 301}, {64, 301}, false},
        {{5000, 301}, {64, 64}, false},
        {{70, 30'000}, {64, 512}, true},    // the last chunks are cut off
        {{2, 1'500'000}, {1, 4096}, true},  // boxes of several chunks
        {{130, 110, 170}, {64, 64, 64}, true},
        {{2, 1, 1100, 3, 700}, {1, 1, 256, 1, 128}, true},
        {{200, 20'000}, {100, 15'000}, false},  // a chunk is larger than a staging buffer
        {{40, 2, 2, 2, 2, 2, 2, 2, 400}, {40, 1, 2, 2, 2, 2, 2, 2, 100}, false},  // too many axes for a GPU
    };
    unsigned number = 0;
    for (const example& each : examples) {
        CAPTURE(to_string(each.shape));
        CAPTURE(to_string(each.chunk));
        const model_tensor tensor = floats_of(each.shape);
        const storage how{.chunk = each.chunk, .is_deflated = ++number % 2 == 0};
        write_dataset(folder / "a.h5", tensor, how);
        check_loads(folder / "a.h5", tensor, each.is_in_boxes);
    }
}

TEST_CASE("load: big-endian and partly written chunked datasets are loaded") {
    const temporary_folder folder;
    for (const bool is_in_boxes : {false, true}) {
        model_tensor tensor = floats_of(is_in_boxes ? shape_vector{70, 30'000} : shape_vector{3000, 600});
        write_dataset(folder / "a.h5", tensor, {.chunk = {64, 512}, .is_big_endian = true});
        check_loads(folder / "a.h5", tensor, is_in_boxes);
        write_dataset(folder / "a.h5", tensor, {.chunk = {64, 512}, .content = written::first_half});
        std::fill(tensor.bytes.begin() + static_cast<std::ptrdiff_t>(tensor.bytes.size() / 2),
                  tensor.bytes.end(), std::byte{});
        check_loads(folder / "a.h5", tensor, is_in_boxes);
    }
}

TEST_CASE("load: a chunked dataset that was never written is loaded as its fill value") {
    const temporary_folder folder;
    model_tensor tensor = floats_of({70, 30'000});
    write_dataset(folder / "a.h5", tensor, {.chunk = {64, 512}, .content = written::nothing});
    std::ranges::fill(tensor.bytes, std::byte{});
    check_loads(folder / "a.h5", tensor, true);
}

TEST_CASE("load: a damaged chunk of a dataset in boxes is refused") {
    const temporary_folder folder;
    const auto path = folder / "a.h5";
    const model_tensor tensor = floats_of({130, 110, 170});
    write_dataset(path, tensor, {.chunk = {64, 64, 64}, .is_deflated = true});
    {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(path) / 2));
        const std::vector<char> damage(1000, 'x');
        file.write(damage.data(), static_cast<std::streamsize>(damage.size()));
    }
    for (const device& device : {device::host(), new_backend().device()})
        CHECK_THROWS_AS(load_tensors(path, device), format_error);
}

TEST_CASE("load: a chunked dataset is loaded to a misaligned destination") {
    const temporary_folder folder;
    const model_tensor tensor = floats_of({130, 110, 170});
    write_dataset(folder / "a.h5", tensor, {.chunk = {64, 64, 64}});
    const tensor_files files({folder / "a.h5"});
    load_backend& backend = new_backend();
    for (const device& device : {device::host(), backend.device()}) {
        std::vector<std::byte> memory(tensor.bytes.size() + 1);
        const std::vector<tensor_request> requests{{.name = "data", .destination = memory.data() + 1}};
        static_cast<void>(files.load(requests, device));
        CHECK(std::ranges::equal(std::span(memory).subspan(1), tensor.bytes));
    }
    CHECK(backend.converted_elements == 0);
}

TEST_CASE("load: many chunked datasets, small and large, are loaded") {
    const temporary_folder folder;
    std::vector<std::filesystem::path> files;
    for (unsigned i = 0; i < 40; ++i) {
        files.push_back(folder / (std::to_string(i) + ".h5"));
        model_tensor tensor = floats_of(i % 20 == 7 ? shape_vector{2000, 700} : shape_vector{30, i + 1});
        tensor.name = "data " + std::to_string(i);
        write_dataset(files.back(), tensor,
                      {.chunk = {i % 20 == 7 ? 2000U : 7U, 1}, .is_deflated = i % 2 == 0});
    }
    for (const device& device : {device::host(), new_backend().device()}) {
        const loaded_tensors loaded = load_tensors(files, device);
        REQUIRE(loaded.tensors.size() == files.size());
        for (unsigned i = 0; i < 40; ++i) {
            const device_tensor& tensor = loaded["data " + std::to_string(i)];
            CHECK(bytes_of(tensor) == floats_of(tensor.shape()).bytes);
        }
    }
}

TEST_CASE("load: small slices of chunked datasets are right, from several threads and many datasets") {
    const temporary_folder folder;
    std::vector<std::filesystem::path> paths;
    std::vector<model_tensor> tensors;
    for (unsigned i = 0; i < 20; ++i) {
        paths.push_back(folder / (std::to_string(i) + ".h5"));
        tensors.push_back(floats_of({200, 300 + i}));
        tensors.back().name = "data " + std::to_string(i);
        write_dataset(paths.back(), tensors.back(), {.chunk = {64, 70}, .is_deflated = i % 2 == 0});
    }
    const tensor_files files(paths);
    std::atomic<unsigned> wrong = 0;
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            std::mt19937_64 random(thread);
            for (unsigned i = 0; i < 200; ++i) {
                const model_tensor& tensor = tensors[random() % tensors.size()];
                tensor_request request{.name = tensor.name};
                for (std::size_t axis = random() % 2; axis < 2; axis += 1 + random() % 2) {
                    const std::uint64_t begin = random() % tensor.shape[axis];
                    request.further_slices.push_back(
                        {axis, begin, std::min(begin + 1 + random() % 9, tensor.shape[axis])});
                }
                const loaded_tensors loaded = files.load({&request, 1}, device::host());
                if (bytes_of(loaded.tensors[0]) != part_of(tensor, request)) ++wrong;
            }
        });
    }
    for (std::thread& each : threads)
        each.join();
    CHECK(wrong == 0);
}

TEST_CASE("load: a file that changes between two small slices is an error") {
    const temporary_folder folder;
    const model_tensor tensor = floats_of({200, 300});
    write_dataset(folder / "a.h5", tensor, {.chunk = {64, 70}, .is_deflated = true});
    const tensor_files files({folder / "a.h5"});
    const tensor_request request{.name = "data", .slice = tensor_slice{0, 3, 5}};
    CHECK(bytes_of(files.load({&request, 1}, device::host()).tensors[0]) == sliced(tensor, *request.slice));
    std::filesystem::resize_file(folder / "a.h5", std::filesystem::file_size(folder / "a.h5") + 1);
    CHECK_THROWS_AS(files.load({&request, 1}, device::host()), data_changed);
}
