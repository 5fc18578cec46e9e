#include <doctest/doctest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "devices.hpp"
#include "model_files.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "pinflow/formats/open.hpp"
#include "temporary_folder.hpp"

// Tensors of .npy, .npz and HDF5 files, and saving.

using namespace pinflow;

namespace {

/// 2 x 3 elements 0 ... 5, stored in Fortran order.
array_view fortran_view() {
    static const float stored[] = {0, 3, 1, 4, 2, 5};
    return {reinterpret_cast<const std::byte*>(stored), dtype::of<float>(), {2, 3}, {4, 8}};
}

template <typename T>
std::vector<T> values_of(const device_tensor& tensor) {
    const auto bytes = bytes_of(tensor);
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
}

/// Writes a safetensors file of a tensor of 3 bytes and one of a type that pinflow lacks.
void write_good_and_bad(const std::filesystem::path& path, const std::string& good, const std::string& bad) {
    const std::string header = "{\"" + good + R"(":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},")" + bad +
                               R"(":{"dtype":"F4","shape":[4],"data_offsets":[3,5]}})";
    std::ofstream file(path, std::ios::binary);
    const std::uint64_t length = header.size();
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << header << "abcde";
}

}  // namespace

TEST_CASE("load: .npy files give tensors of their names, in C order, little-endian and sliced") {
    const temporary_folder folder;
    write_npy(folder / "fortran.npy", fortran_view());
    const std::uint16_t swapped[] = {0x0100, 0x0200, 0x0300};
    write_npy(folder / "big.npy", {reinterpret_cast<const std::byte*>(swapped), dtype::parse(">u2"), {3}});
    const std::vector<std::filesystem::path> files{folder / "fortran.npy", folder / "big.npy"};
    on_each_device([&](const device& device) {
        const loaded_tensors loaded = load_tensors(files, device);
        CHECK(values_of<float>(loaded["fortran"]) == std::vector<float>{0, 1, 2, 3, 4, 5});
        CHECK(loaded["big"].dtype() == dtype::of<std::uint16_t>());
        CHECK(values_of<std::uint16_t>(loaded["big"]) == std::vector<std::uint16_t>{1, 2, 3});
        const std::vector<tensor_request> requests{{"fortran", tensor_slice{1, 1, 3}, dtype::of<double>()},
                                                   {"big", tensor_slice{0, 2, 3}}};
        const loaded_tensors parts = tensor_files(files).load(requests, device);
        CHECK(values_of<double>(parts.tensors[0]) == std::vector<double>{1, 2, 4, 5});
        CHECK(values_of<std::uint16_t>(parts.tensors[1]) == std::vector<std::uint16_t>{3});
    });
}

TEST_CASE("load: a cast of all tensors leaves integers and long doubles as they are") {
    const temporary_folder folder;
    const float value = 1.5F;
    const long double wide = 2.5L;
    const std::int32_t number = 3;
    write_npy(folder / "value.npy", {reinterpret_cast<const std::byte*>(&value), dtype::of<float>(), {1}});
    write_npy(folder / "wide.npy", {reinterpret_cast<const std::byte*>(&wide), dtype::parse("<f16"), {1}});
    write_npy(folder / "number.npy",
              {reinterpret_cast<const std::byte*>(&number), dtype::of<std::int32_t>(), {1}});
    const std::vector<std::filesystem::path> files{folder / "value.npy", folder / "wide.npy",
                                                   folder / "number.npy"};
    on_each_device([&](const device& device) {
        load_options options;
        options.dtype = dtype::of<double>();
        const loaded_tensors loaded = load_tensors(files, device, options);
        CHECK(values_of<double>(loaded["value"]) == std::vector<double>{1.5});
        CHECK(loaded["wide"].dtype() == dtype::parse("<f16"));
        CHECK(values_of<std::int32_t>(loaded["number"]) == std::vector<std::int32_t>{3});

        options.names = {"[vn]*"};
        const std::vector<tensor_request> selected = tensor_files(files).select(options);
        REQUIRE(selected.size() == 2);
        CHECK(selected[0].name == "value");
        CHECK(selected[0].dtype == dtype::of<double>());
        CHECK(selected[1].name == "number");
        CHECK_FALSE(selected[1].dtype);
    });
}

TEST_CASE("load: members of .npz files are tensors") {
    const temporary_folder folder;
    const auto large = random_tensor("large", dtype::of<double>(), {700'000});
    const auto small = random_tensor("small", dtype::parse("|u1"), {3, 5});
    npz_writer writer(folder / "a.npz");
    for (const model_tensor* const each : {&large, &small}) {
        writer.begin(each->name, each->dtype, each->shape);
        writer.write(each->bytes);
    }
    writer.finish();
    on_each_device([&](const device& device) {
        const loaded_tensors loaded = load_tensors(folder / "a.npz", device);
        CHECK(bytes_of(loaded["large"]) == large.bytes);
        CHECK(bytes_of(loaded["small"]) == small.bytes);
    });
}

TEST_CASE("load: datasets of HDF5 files are tensors, and compressed ones are decoded") {
    const temporary_folder folder;
    const auto path = folder / "a.h5";
    const auto deflated = random_tensor("deflated", dtype::of<std::int32_t>(), {1000, 300});
    const auto plain = random_tensor("group/plain", dtype::of<float>(), {400'000});
    try {
        hdf5_writer writer(path);
        for (const auto& [tensor, level] : {std::pair(&deflated, 4U), {&plain, 0U}}) {
            writer.begin({tensor->name, tensor->dtype, tensor->shape, level});
            writer.write(tensor->bytes);
        }
        writer.finish();
    } catch (const format_not_built&) {
        MESSAGE("skipped: this build has no HDF5");
        return;
    }
    on_each_device([&](const device& device) {
        const loaded_tensors loaded = load_tensors(path, device);
        CHECK(bytes_of(loaded["deflated"]) == deflated.bytes);
        CHECK(bytes_of(loaded["group/plain"]) == plain.bytes);
        const std::vector<tensor_request> requests{{"deflated", tensor_slice{1, 100, 101}}};
        CHECK(bytes_of(tensor_files({path}).load(requests, device).tensors[0]) ==
              sliced(deflated, {1, 100, 101}));
    });
}

TEST_CASE("load: many compressed datasets of one HDF5 file are loaded, and a damaged one is refused") {
    const temporary_folder folder;
    const auto path = folder / "a.h5";
    std::vector<model_tensor> tensors;
    for (unsigned i = 0; i < 60; ++i)
        tensors.push_back(random_tensor("group/" + std::to_string(i), dtype::of<float>(), {40, 1 + i}));
    for (model_tensor& tensor : tensors) {
        for (std::size_t i = 1; i < tensor.bytes.size(); i += 2)
            tensor.bytes[i] = {};  // so that chunks can be compressed
    }
    try {
        hdf5_writer writer(path);
        for (const model_tensor& tensor : tensors) {
            writer.begin({tensor.name, tensor.dtype, tensor.shape, 4});
            writer.write(tensor.bytes);
        }
        writer.finish();
    } catch (const format_not_built&) {
        MESSAGE("skipped: this build has no HDF5");
        return;
    }
    on_each_device([&](const device& device) {
        const tensor_files files({path});
        const loaded_tensors first = load_tensors(path, device);
        const std::vector<tensor_request> requests = files.select({});
        for (int repetition = 0; repetition < 2; ++repetition) {
            const loaded_tensors again = files.load(requests, device);
            for (const model_tensor& tensor : tensors) {
                CHECK(bytes_of(first[tensor.name]) == tensor.bytes);
                CHECK(bytes_of(again[tensor.name]) == tensor.bytes);
            }
        }
    });
    {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(path) / 4));
        const std::vector<char> damage(3000, 'x');  // of several datasets
        file.write(damage.data(), static_cast<std::streamsize>(damage.size()));
    }
    on_each_device([&](const device& device) {
        CHECK_THROWS_AS(load_tensors(path, device), format_error);
        unsigned whole = 0;
        const tensor_files files({path});
        for (const model_tensor& tensor : tensors) {
            const std::vector<tensor_request> requests{{tensor.name}};
            try {
                whole += bytes_of(files.load(requests, device).tensors[0]) == tensor.bytes ? 1U : 0U;
            } catch (const format_error&) {
                continue;
            }
        }
        CHECK(whole >= 50);
        CHECK(whole < 60);
    });
}

TEST_CASE("load: of a slice of a compressed HDF5 dataset only the chunks with its rows are decoded") {
    const temporary_folder folder;
    const auto path = folder / "a.h5";
    auto deflated = random_tensor("deflated", dtype::of<std::int32_t>(), {10'000, 300});  // 12 MB
    for (std::size_t i = 1; i < deflated.bytes.size(); i += 2)
        deflated.bytes[i] = {};  // so that chunks can be compressed
    try {
        hdf5_writer writer(path);
        writer.begin({deflated.name, deflated.dtype, deflated.shape, 1});
        writer.write(deflated.bytes);
        writer.finish();
    } catch (const format_not_built&) {
        MESSAGE("skipped: this build has no HDF5");
        return;
    }
    {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(path) / 2));
        const std::vector<char> damage(1000, 'x');
        file.write(damage.data(), static_cast<std::streamsize>(damage.size()));
    }
    on_each_device([&](const device& device) {
        CHECK_THROWS_AS(load_tensors(path, device), format_error);
        for (const tensor_slice& slice : {tensor_slice{0, 0, 1}, {0, 17, 1000}, {0, 9000, 10'000}}) {
            const std::vector<tensor_request> requests{{"deflated", slice}};
            CHECK(bytes_of(tensor_files({path}).load(requests, device).tensors[0]) ==
                  sliced(deflated, slice));
        }
    });
}

TEST_CASE("load: a compressed HDF5 dataset is loaded by several threads, again and again, until it changes") {
    const temporary_folder folder;
    const auto path = folder / "a.h5";
    const auto deflated = random_tensor("deflated", dtype::of<std::int32_t>(), {1000, 300});
    const auto other = random_tensor("deflated", dtype::of<std::int32_t>(), {1000, 300});
    const auto write = [&](const std::filesystem::path& file, const model_tensor& tensor) {
        hdf5_writer writer(file);
        writer.begin({tensor.name, tensor.dtype, tensor.shape, 1});
        writer.write(tensor.bytes);
        writer.finish();
    };
    try {
        write(path, deflated);
    } catch (const format_not_built&) {
        MESSAGE("skipped: this build has no HDF5");
        return;
    }
    const tensor_files files({path});
    const auto is_right = [&](std::uint64_t begin) {
        const std::vector<tensor_request> requests{{"deflated", tensor_slice{0, begin, begin + 30}}};
        return bytes_of(files.load(requests, device::host()).tensors[0]) ==
               sliced(deflated, {0, begin, begin + 30});
    };
    std::vector<std::thread> threads;
    std::atomic<unsigned> right = 0;
    for (std::uint64_t thread = 0; thread < 3; ++thread) {
        threads.emplace_back([&, thread] {
            for (std::uint64_t begin = thread; begin < 900; begin += 97)
                right += is_right(begin) ? 1U : 0U;
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(right == 30);
    write(folder / "b.h5", other);
    std::filesystem::rename(folder / "b.h5", path);
    CHECK_THROWS_AS(is_right(5), data_changed);
}

TEST_CASE("load: a file that is decoded, and was replaced by one of another shape, has changed") {
    const temporary_folder folder;
    const float stored[24] = {};
    const auto* const data = reinterpret_cast<const std::byte*>(stored);
    on_each_device([&](const device& device) {
        for (const shape_vector& shape : {shape_vector{2, 3}, shape_vector{24}, shape_vector{}}) {
            const auto path = folder / "a.npy";
            write_npy(path, {data, dtype::of<float>(), {4, 6}, {4, 16}});  // Fortran order is decoded
            const tensor_files files({path});
            write_npy(path, {data, dtype::of<float>(), shape});
            for (const tensor_slice& slice : {tensor_slice{0, 2, 4}, {1, 3, 6}}) {
                const std::vector<tensor_request> requests{{"a", slice}};
                CHECK_THROWS_WITH_AS(files.load(requests, device), doctest::Contains("changed"),
                                     data_changed);
            }
        }
    });
}

TEST_CASE("load: a tensor of a type that pinflow lacks is refused by name, and others can be loaded") {
    const temporary_folder folder;
    write_good_and_bad(folder / "a.safetensors", "good", "bad");
    CHECK_THROWS_WITH_AS(load_tensors(folder / "a.safetensors", device::host()), doctest::Contains("'bad'"),
                         unsupported);
    load_options options;
    options.names = {"good"};
    CHECK(load_tensors(folder / "a.safetensors", device::host(), options).tensors.size() == 1);
    const tensor_files files({folder / "a.safetensors"});
    CHECK(files.tensors().size() == 1);
    CHECK(files.tensor("good").size_bytes == 3);
    CHECK_THROWS_AS(files.tensor("bad"), unsupported);
    CHECK_THROWS_AS(files.tensor("none"), invalid_argument);
}

TEST_CASE("load: two tensors of one name are refused, whether they could be loaded or not") {
    const temporary_folder folder;
    write_good_and_bad(folder / "a.safetensors", "x", "y");
    for (const auto& [good, bad] : {std::pair("x", "z"), std::pair("z", "x"), std::pair("z", "y")}) {
        CAPTURE(good);
        CAPTURE(bad);
        write_good_and_bad(folder / "b.safetensors", good, bad);
        const std::string both = bad == std::string("y") ? "y" : "x";
        CHECK_THROWS_WITH_AS(tensor_files({folder / "a.safetensors", folder / "b.safetensors"}),
                             doctest::Contains(("'" + both + "'").c_str()), invalid_argument);
    }
    write_good_and_bad(folder / "b.safetensors", "v", "w");
    CHECK(tensor_files({folder / "a.safetensors", folder / "b.safetensors"}).tensors().size() == 2);
}

TEST_CASE("save: what was saved is loaded again, with its metadata, tensors of no elements too") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("large", dtype::of<float>(), {9'000'001}),
                                            random_tensor("empty", dtype::of<float>(), {0, 4}),
                                            random_tensor("scalar", dtype::of<double>(), {}),
                                            random_tensor("half", dtype::parse("<f2"), {100, 3})};
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        const loaded_tensors loaded = load_tensors(folder / "a.safetensors", device);
        const stream stream(device);
        std::vector<tensor_to_save> saved;
        for (const device_tensor& each : loaded.tensors)
            saved.push_back({each.name(), each.dtype(), each.shape(), each.data()});
        std::uint64_t done_bytes = 0;
        save_tensors(folder / "b.safetensors", saved, stream, {{"format", "pt"}},
                     [&](std::uint64_t done, std::uint64_t total) { done_bytes = done == total ? done : 0; });
        CHECK(done_bytes == loaded.report.size_bytes);
        CHECK_THROWS_AS(save_tensors(folder / "c.safetensors", saved, stream, {},
                                     [](std::uint64_t, std::uint64_t) { throw std::out_of_range("enough"); }),
                        std::out_of_range);
        const tensor_files again({folder / "b.safetensors"});
        CHECK(again.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
        const loaded_tensors reloaded = load_tensors(folder / "b.safetensors", device);
        for (const model_tensor& each : tensors) {
            CHECK(reloaded[each.name].shape() == each.shape);
            CHECK(bytes_of(reloaded[each.name]) == each.bytes);
        }
        const tensor_to_save no_data{"x", dtype::of<float>(), {2}, nullptr};
        CHECK_THROWS_AS(save_tensors(folder / "c.safetensors", {&no_data, 1}, stream), invalid_argument);
        saved.push_back(saved.front());
        CHECK_THROWS_AS(save_tensors(folder / "c.safetensors", saved, stream), invalid_argument);
        CHECK_FALSE(std::filesystem::exists(folder / "c.safetensors"));
        save_tensors(folder / "none.safetensors", {}, stream);
        CHECK(load_tensors(folder / "none.safetensors", device).tensors.empty());
    });
}

TEST_CASE("save: a tensor whose file has been truncated is refused, and nothing is written") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("large", dtype::of<float>(), {9'000'001})};
    write_model(folder / "a.safetensors", tensors);
    const loaded_tensors loaded = load_tensors(folder / "a.safetensors", device::host());
    REQUIRE(loaded.report.mapped_bytes > 0);
    const device_tensor& large = loaded["large"];
    std::filesystem::resize_file(folder / "a.safetensors", 20'000'000);
    const tensor_to_save saved{"large", large.dtype(), large.shape(), large.data()};
    const stream stream(device::host());
    for (const char* const name : {"b.safetensors", "a.safetensors"}) {
        CHECK_THROWS_WITH_AS(save_tensors(folder / name, {&saved, 1}, stream), doctest::Contains("'large'"),
                             data_changed);
    }
    CHECK_FALSE(std::filesystem::exists(folder / "b.safetensors"));
    CHECK(std::filesystem::file_size(folder / "a.safetensors") == 20'000'000);
}
