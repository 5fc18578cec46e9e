#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "counting_resource.hpp"
#include "devices.hpp"
#include "model_files.hpp"
#include "pinflow/error.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

namespace {

/// A tensor of each safetensors type that pinflow has, then a scalar, empty tensors, and one that is not
/// aligned.
std::vector<model_tensor> one_of_each_type() {
    std::vector<model_tensor> tensors;
    for (const char* const type :
         {"<f8", "<i8", "<u8", "<c8", "<f4", "<i4", "<u4", "<f2", "bfloat16", "<i2", "<u2", "|i1", "|u1",
          "|b1", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"})
        tensors.push_back(random_tensor(type, dtype::parse(type), {7, 11}));
    tensors.push_back(random_tensor("scalar", dtype::of<float>(), {}));
    tensors.push_back(random_tensor("empty", dtype::of<float>(), {3, 0, 5}));
    tensors.push_back(random_tensor("none", dtype::parse("|u1"), {0}));
    tensors.push_back(random_tensor("odd", dtype::parse("|u1"), {13}));
    tensors.push_back(random_tensor("after odd", dtype::of<double>(), {3}));  // not aligned in the file
    return tensors;
}

void check_equal(const loaded_tensors& loaded, std::span<const model_tensor> expected) {
    REQUIRE(loaded.tensors.size() == expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const device_tensor& tensor = loaded.tensors[i];
        CAPTURE(tensor.name());
        CHECK(loaded[expected[i].name].dtype() == expected[i].dtype);
        CHECK(loaded[expected[i].name].shape() == expected[i].shape);
        CHECK(bytes_of(loaded[expected[i].name]) == expected[i].bytes);
        CHECK((tensor.data() == nullptr) == (tensor.size_bytes() == 0));
    }
}

}  // namespace

TEST_CASE("load: every type, empty tensors and tensors without axes have the bytes of the file") {
    const temporary_folder folder;
    const auto tensors = one_of_each_type();
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        const loaded_tensors loaded = load_tensors(folder / "a.safetensors", device);
        check_equal(loaded, tensors);
        std::uint64_t total = 0;
        for (const model_tensor& each : tensors)
            total += each.bytes.size();
        CHECK(loaded.report.size_bytes == total);
        CHECK(loaded.report.copied_bytes + loaded.report.staged_bytes + loaded.report.mapped_bytes == total);
        CHECK_FALSE(loaded.report.reason.empty());
        for (const device_tensor& each : loaded.tensors) {
            if (device.kind() == device_kind::cuda)
                CHECK(reinterpret_cast<std::uintptr_t>(each.data()) % 256 == 0);
        }
    });
}

TEST_CASE("load: large tensors arrive whole by every route, from several files") {
    const temporary_folder folder;
    const std::vector<model_tensor> first{random_tensor("w", dtype::of<float>(), {5'000'001}),
                                          random_tensor("b", dtype::of<float>(), {77}),
                                          random_tensor("v", dtype::parse("bfloat16"), {3000, 4001})};
    // "u": 3 bytes more than a multiple of 4 MiB
    const std::vector<model_tensor> second{random_tensor("u", dtype::parse("|u1"), {(20 << 20) + 3}),
                                           random_tensor("t", dtype::of<double>(), {200'000})};
    write_model(folder / "1.safetensors", first);
    write_model(folder / "2.safetensors", second);
    std::vector<model_tensor> all = first;
    all.insert(all.end(), second.begin(), second.end());
    const std::vector<std::filesystem::path> files{folder / "1.safetensors", folder / "2.safetensors"};
    on_each_device([&](const device& device) {
        for (const load_route route : {load_route::automatic, load_route::staged, load_route::both}) {
            CAPTURE(to_string(route));
            for (const unsigned threads : {0U, 1U, 3U}) {
                load_options options;
                options.route = route;
                options.threads = threads;
                check_equal(load_tensors(files, device, options), all);
            }
        }
        // "b" is too short for the copy engine
        load_options only_copy;
        only_copy.route = load_route::copy;
        only_copy.names = {"w", "v", "u", "t"};
        const loaded_tensors copied = load_tensors(files, device, only_copy);
        CHECK_THROWS_AS(load_tensors(files, device, {.route = static_cast<load_route>(4)}), invalid_argument);
        for (const model_tensor& each : all) {
            if (each.name != "b") CHECK(bytes_of(copied[each.name]) == each.bytes);
        }
        if (device.kind() == device_kind::cuda) {
            CHECK(copied.report.copied_bytes == copied.report.size_bytes);
            only_copy.names = {};
            CHECK_THROWS_AS(load_tensors(files, device, only_copy), unsupported);
        }
    });
}

TEST_CASE("load: thousands of small tensors are loaded whole, with few allocations on a GPU") {
    const temporary_folder folder;
    std::vector<model_tensor> tensors;
    for (unsigned i = 0; i < 3000; ++i)
        tensors.push_back(random_tensor("t" + std::to_string(i), dtype::of<float>(), {1 + i % 7 * 512}));
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        const auto resource = std::make_shared<counting_resource>();
        load_options options;
        options.resource = resource;
        {
            const loaded_tensors loaded = load_tensors(folder / "a.safetensors", device, options);
            check_equal(loaded, tensors);
            if (device.kind() == device_kind::cuda) {
                CHECK(resource->allocated > 0);
                CHECK(resource->allocated < 30);
            }
        }
        CHECK(resource->allocated == resource->deallocated);
    });
}

TEST_CASE("load: names and patterns select tensors, and unknown ones are refused") {
    const temporary_folder folder;
    std::vector<model_tensor> tensors;
    for (const char* const name : {"layers.0.q", "layers.0.k", "layers.1.q", "head", "a*b"})
        tensors.push_back(random_tensor(name, dtype::of<float>(), {4, 3}));
    write_model(folder / "a.safetensors", tensors);
    const auto names_of = [&](std::vector<std::string> wanted) {
        load_options options;
        options.names = std::move(wanted);
        std::vector<std::string> names;
        for (const device_tensor& each :
             load_tensors(folder / "a.safetensors", device::host(), options).tensors)
            names.push_back(each.name());
        return names;
    };
    CHECK(names_of({"layers.*.q"}) == std::vector<std::string>{"layers.0.q", "layers.1.q"});
    CHECK(names_of({"head", "layers.0.?"}) == std::vector<std::string>{"layers.0.q", "layers.0.k", "head"});
    CHECK(names_of({"a*b"}) == std::vector<std::string>{"a*b"});  // a name comes before a pattern
    CHECK(names_of({"head", "head"}) == std::vector<std::string>{"head"});
    CHECK_THROWS_WITH_AS(names_of({"tail"}), doctest::Contains("'tail'"), invalid_argument);
    CHECK_THROWS_AS(names_of({"tail.*"}), invalid_argument);
}

TEST_CASE("load: a slice has the elements of the whole tensor, along every axis") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("a", dtype::parse("<i2"), {5, 7, 9}),
                                            random_tensor("b", dtype::of<float>(), {900, 2500}),
                                            random_tensor("c", dtype::parse("|u1"), {3, 40'000, 50}),
                                            random_tensor("d", dtype::of<double>(), {1, 600'000})};
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        const tensor_files files({folder / "a.safetensors"});
        for (const model_tensor& tensor : tensors) {
            CAPTURE(tensor.name);
            for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
                const std::uint64_t length = tensor.shape[axis];
                for (const auto& [begin, end] : {std::pair<std::uint64_t, std::uint64_t>(0, length),
                                                 {0, length / 2},
                                                 {length / 2, length},
                                                 {length / 3, length / 3 + 1},
                                                 {length, length}}) {
                    if (end > length) continue;
                    CAPTURE(axis);
                    CAPTURE(begin);
                    CAPTURE(end);
                    const tensor_slice slice{axis, begin, end};
                    const tensor_request request{tensor.name, slice};
                    const loaded_tensors loaded = files.load({&request, 1}, device);
                    shape_vector shape = tensor.shape;
                    shape[axis] = end - begin;
                    CHECK(loaded.tensors[0].shape() == shape);
                    CHECK(bytes_of(loaded.tensors[0]) == sliced(tensor, slice));
                }
            }
        }
        for (const tensor_slice& wrong :
             {tensor_slice{3, 0, 1}, tensor_slice{0, 0, 6}, tensor_slice{1, 3, 2}}) {
            const tensor_request request{"a", wrong};
            CHECK_THROWS_AS(files.load({&request, 1}, device), invalid_argument);
        }
    });
}

TEST_CASE("load: boxes of tensors are loaded, of mapped, decoded and cast ones") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("a", dtype::parse("<i2"), {5, 7, 9}),
                                            random_tensor("b", dtype::of<float>(), {60, 70, 80, 3}),
                                            random_tensor("c", dtype::parse("|u1"), {3, 400, 5000})};
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        const tensor_files files({folder / "a.safetensors"});
        for (const model_tensor& tensor : tensors) {
            CAPTURE(tensor.name);
            const std::uint64_t rows = tensor.shape[0], columns = tensor.shape[1], depth = tensor.shape[2];
            const std::vector<std::vector<tensor_slice>> boxes{{{0, 1, 3}, {1, 2, 5}},
                                                               {{1, 2, 5}, {2, 3, depth - 1}},
                                                               {{2, 4, 5}, {0, 1, 2}},
                                                               {{2, 0, depth}, {1, 0, columns}, {0, 1, rows}},
                                                               {{2, 1, 7}, {1, 3, columns}, {0, 1, rows - 1}},
                                                               {{0, 2, 3}, {1, 6, 7}, {2, 0, 1}},
                                                               {{0, 1, 1}, {1, 0, 5}}};
            for (std::size_t i = 0; i < boxes.size(); ++i) {
                CAPTURE(i);
                const tensor_request all_further{.name = tensor.name, .further_slices = boxes[i]};
                const tensor_request with_first{.name = tensor.name,
                                                .slice = boxes[i][0],
                                                .further_slices = {boxes[i].begin() + 1, boxes[i].end()}};
                for (const tensor_request& request : {all_further, with_first}) {
                    const loaded_tensors loaded = files.load({&request, 1}, device);
                    shape_vector shape = tensor.shape;
                    for (const tensor_slice& slice : boxes[i])
                        shape[slice.axis] = slice.end - slice.begin;
                    CHECK(loaded.tensors[0].shape() == shape);
                    CHECK(bytes_of(loaded.tensors[0]) == part_of(tensor, request));
                }
            }
        }
        const tensor_request whole{.name = "b", .dtype = dtype::of<double>()};
        model_tensor doubles{"b", dtype::of<double>(), tensors[1].shape, {}};
        doubles.bytes = bytes_of(files.load({&whole, 1}, device).tensors[0]);
        const tensor_request part{.name = "b",
                                  .slice = tensor_slice{0, 3, 50},
                                  .dtype = dtype::of<double>(),
                                  .further_slices = {{2, 1, 79}, {3, 1, 3}}};
        CHECK(bytes_of(files.load({&part, 1}, device).tensors[0]) == part_of(doubles, part));
        for (const std::vector<tensor_slice>& wrong : {std::vector<tensor_slice>{{0, 0, 1}, {0, 0, 1}},
                                                       {{0, 0, 1}, {3, 0, 1}},
                                                       {{1, 0, 2}, {2, 0, 10}}}) {
            const tensor_request request{.name = "a", .further_slices = wrong};
            CHECK_THROWS_AS(files.load({&request, 1}, device), invalid_argument);
        }
        const tensor_request twice{
            .name = "a", .slice = tensor_slice{1, 0, 2}, .further_slices = {{1, 0, 2}}};
        CHECK_THROWS_WITH_AS(files.load({&twice, 1}, device), doctest::Contains("twice along axis 1"),
                             invalid_argument);
    });
}

TEST_CASE("load: elements are cast on arrival, slices too") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{counting_tensor("a", {300, 1000}), counting_tensor("small", {10}),
                                            random_tensor("ids", dtype::of<std::int64_t>(), {1000})};
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        load_options options;
        options.dtype = dtype::parse("bfloat16");
        const loaded_tensors loaded = load_tensors(folder / "a.safetensors", device, options);
        CHECK(loaded["ids"].dtype() == dtype::of<std::int64_t>());
        CHECK(bytes_of(loaded["ids"]) == tensors[2].bytes);
        CHECK(loaded["a"].dtype() == dtype::parse("bfloat16"));
        const auto bytes = bytes_of(loaded["a"]);
        REQUIRE(bytes.size() == tensors[0].bytes.size() / 2);
        bool are_upper_halves = true;
        for (std::size_t i = 0; i < bytes.size(); ++i)
            are_upper_halves = are_upper_halves && bytes[i] == tensors[0].bytes[i / 2 * 4 + 2 + i % 2];
        CHECK(are_upper_halves);

        const tensor_files files({folder / "a.safetensors"});
        const tensor_request request{"a", tensor_slice{1, 200, 700}, dtype::of<double>()};
        const auto doubles = bytes_of(files.load({&request, 1}, device).tensors[0]);
        const auto floats = sliced(tensors[0], {1, 200, 700});
        REQUIRE(doubles.size() == 2 * floats.size());
        bool are_equal = true;
        for (std::size_t i = 0; i < floats.size() / 4; ++i) {
            float from = 0;
            double to = 0;
            std::memcpy(&from, &floats[4 * i], 4);
            std::memcpy(&to, &doubles[8 * i], 8);
            are_equal = are_equal && static_cast<double>(from) == to;
        }
        CHECK(are_equal);
        const tensor_request impossible{"a", std::nullopt, dtype::parse("|S4")};
        CHECK_THROWS_AS(files.load({&impossible, 1}, device), invalid_argument);
    });
}

TEST_CASE("load: a caller's memory receives a tensor") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("large", dtype::of<float>(), {1'300'000}),
                                            random_tensor("small", dtype::of<float>(), {5}),
                                            random_tensor("other", dtype::of<float>(), {6})};
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        const stream stream(device);
        const device_buffer large(tensors[0].bytes.size(), stream);
        const device_buffer small(256, stream);
        stream.synchronize();
        const std::vector<tensor_request> requests{
            {"small", std::nullopt, std::nullopt, small.data()},
            {"large", std::nullopt, std::nullopt, large.data()},
            {"other"},
        };
        const tensor_files files({folder / "a.safetensors"});
        const loaded_tensors loaded = files.load(requests, device);
        CHECK(loaded.tensors[0].data() == small.data());
        CHECK(loaded["large"].data() == large.data());
        CHECK(loaded["large"].share() == nullptr);
        check_equal(loaded, tensors);
        const std::vector<tensor_request> twice{{"small"}, {"small"}};
        CHECK_THROWS_AS(files.load(twice, device), invalid_argument);
        const tensor_request unknown{"nothing"};
        CHECK_THROWS_AS(files.load({&unknown, 1}, device), invalid_argument);
        CHECK(files.load({}, device).tensors.empty());
    });
}

TEST_CASE("load: a caller's memory may begin at any address") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("large", dtype::of<float>(), {1'300'000}),
                                            counting_tensor("cast", {300, 1000}),
                                            random_tensor("small", dtype::of<float>(), {5})};
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        const tensor_files files({folder / "a.safetensors"});
        std::vector<tensor_request> requests{
            {"large"}, {"cast", tensor_slice{1, 200, 700}, dtype::of<double>()}, {"small"}};
        const loaded_tensors expected = files.load(requests, device);
        const stream stream(device);
        std::vector<device_buffer> memory;
        for (std::size_t i = 0; i < requests.size(); ++i) {
            memory.emplace_back(expected.tensors[i].size_bytes() + 8, stream);
            requests[i].destination = memory.back().data() + 2 * i + 1;
        }
        stream.synchronize();
        const loaded_tensors loaded = files.load(requests, device);
        for (std::size_t i = 0; i < requests.size(); ++i) {
            CHECK(loaded.tensors[i].data() == requests[i].destination);
            CHECK(bytes_of(loaded.tensors[i]) == bytes_of(expected.tensors[i]));
        }
    });
}

TEST_CASE("load: tensors outlive their tensor_files and requests, and can be dropped on another thread") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("w", dtype::of<float>(), {2'000'000}),
                                            random_tensor("b", dtype::of<float>(), {9})};
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        std::vector<device_tensor> kept;
        {
            const auto files =
                std::make_unique<tensor_files>(std::vector<std::filesystem::path>{folder / "a.safetensors"});
            const std::vector<tensor_request> requests{{"w"}, {"b"}};
            kept = files->load(requests, device).tensors;
        }
        CHECK(bytes_of(kept[0]) == tensors[0].bytes);
        CHECK(bytes_of(kept[1]) == tensors[1].bytes);
        const stream other(device);
        kept[0].used_on(other);
        std::thread([dropped = std::move(kept)] { CHECK(dropped.size() == 2); }).join();
    });
}

TEST_CASE("load: the host device maps whole tensors, and writing to them does not change the file") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("w", dtype::of<float>(), {300'000})};
    write_model(folder / "a.safetensors", tensors);
    {
        const loaded_tensors loaded = load_tensors(folder / "a.safetensors", device::host());
        CHECK(loaded.tensors[0].is_mapped());
        CHECK(loaded.report.mapped_bytes == tensors[0].bytes.size());
        CHECK(loaded.report.staged_bytes == 0);
        std::fill_n(loaded.tensors[0].data(), loaded.tensors[0].size_bytes(), std::byte{1});
    }
    check_equal(load_tensors(folder / "a.safetensors", device::host()), tensors);
}

TEST_CASE(
    "load: on the host device, a file is read if less than 64 KiB of it is loaded, and mapped otherwise") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("small", dtype::of<float>(), {(16 << 10) - 1}),
                                            random_tensor("large", dtype::of<float>(), {16 << 10})};
    write_model(folder / "a.safetensors", tensors);
    const tensor_files files({folder / "a.safetensors"});
    const auto load = [&](const std::string& name) {
        const tensor_request one{name};
        return files.load({&one, 1}, device::host());
    };
    const loaded_tensors small = load("small");
    CHECK_FALSE(small.tensors[0].is_mapped());
    CHECK_FALSE(files.tensor("small").is_mappable);
    CHECK(load("large").tensors[0].is_mapped());
    CHECK(files.tensor("large").is_mappable);
    CHECK(bytes_of(small.tensors[0]) == tensors[0].bytes);
    CHECK(load_tensors(folder / "a.safetensors", device::host())["small"].is_mapped());

    // with many mappings, only large parts are mapped; loads of tensors that are kept do not exhaust them
    std::vector<loaded_tensors> kept;
    while (kept.size() < 20'000 && (kept.empty() || kept.back().tensors[0].is_mapped()))
        kept.push_back(load("large"));
    CHECK(kept.size() > 1000);
    CHECK(kept.size() < 20'000);
    CHECK(bytes_of(kept.front().tensors[0]) == tensors[1].bytes);
    CHECK(bytes_of(kept.back().tensors[0]) == tensors[1].bytes);
    kept.clear();
    CHECK(load("large").tensors[0].is_mapped());
}

TEST_CASE("load: destinations that overlap are refused before anything is written") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("a", dtype::of<float>(), {25}),
                                            random_tensor("b", dtype::of<float>(), {25}),
                                            random_tensor("empty", dtype::of<float>(), {0})};
    write_model(folder / "a.safetensors", tensors);
    const tensor_files files({folder / "a.safetensors"});
    std::vector<std::byte> memory(200);
    const auto load = [&](std::size_t a, std::size_t b) {
        return files.load(std::vector<tensor_request>{{.name = "a", .destination = memory.data() + a},
                                                      {.name = "b", .destination = memory.data() + b},
                                                      {.name = "empty", .destination = memory.data() + a}},
                          device::host());
    };
    const std::vector<std::pair<std::size_t, std::size_t>> overlapping{{0, 0}, {0, 99}, {99, 0}};
    for (const auto& [a, b] : overlapping) {
        CHECK_THROWS_WITH_AS(load(a, b), doctest::Contains("overlap"), invalid_argument);
        CHECK(std::ranges::count(memory, std::byte{}) == 200);
    }
    CHECK(load(0, 100).tensors.size() == 3);
    CHECK(load(100, 0).tensors.size() == 3);
}

TEST_CASE("load: exhausted host memory is a system_failure that names the file") {
    struct exhausted final : memory_resource {
        std::byte* allocate(std::uint64_t, stream_view) override { throw std::bad_alloc(); }
        void deallocate(std::byte*, std::uint64_t, stream_view) noexcept override {}
    };
    const temporary_folder folder;
    write_model(folder / "a.safetensors", std::vector{random_tensor("a", dtype::of<float>(), {25})});
    load_options options;
    options.resource = std::make_shared<exhausted>();
    CHECK_THROWS_WITH_AS(load_tensors(folder / "a.safetensors", device::host(), options),
                         doctest::Contains("a.safetensors'"), system_failure);
    const tensor_files files({folder / "a.safetensors"});
    const tensor_request one{"a"};
    CHECK_THROWS_WITH_AS(files.load({&one, 1}, device::host(), options), doctest::Contains("a.safetensors'"),
                         system_failure);
}

TEST_CASE("load: progress ends with all bytes, and an exception of it ends the load") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("w", dtype::of<float>(), {9'000'000})};
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        load_options options;
        std::uint64_t last = 0, total = 0;
        options.progress = [&](std::uint64_t done, std::uint64_t all) {
            CHECK(done >= last);
            last = done;
            total = all;
        };
        load_tensors(folder / "a.safetensors", device, options);
        CHECK(last == tensors[0].bytes.size());
        CHECK(total == last);
        options.progress = [](std::uint64_t, std::uint64_t) { throw invalid_argument("enough"); };
        CHECK_THROWS_WITH_AS(load_tensors(folder / "a.safetensors", device, options), "enough",
                             invalid_argument);
    });
}

TEST_CASE("load: damaged, changed and missing files are errors, and a changed one leaves no memory behind") {
    const temporary_folder folder;
    const std::vector<model_tensor> tensors{random_tensor("w", dtype::of<float>(), {3'000'000}),
                                            random_tensor("v", dtype::of<float>(), {3'000'000})};
    const auto path = folder / "a.safetensors";
    on_each_device([&](const device& device) {
        write_model(path, tensors);
        CHECK_THROWS_AS(load_tensors(folder / "none.safetensors", device), system_failure);
        CHECK_THROWS_AS(load_tensors(std::span<const std::filesystem::path>(), device), invalid_argument);
        const std::vector<std::filesystem::path> twice{path, path};
        CHECK_THROWS_AS(tensor_files({path}).load(std::vector<tensor_request>{{"none"}}, device),
                        invalid_argument);
        CHECK_THROWS_AS(load_tensors(twice, device), invalid_argument);

        const tensor_files files({path});
        const std::vector<tensor_request> requests{{"w", tensor_slice{0, 1, 3'000'000}, dtype::of<double>()},
                                                   {"v", tensor_slice{0, 1, 3'000'000}, dtype::of<double>()}};
        std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
        const auto resource = std::make_shared<counting_resource>();
        load_options options;
        options.resource = resource;
        CHECK_THROWS_AS(files.load(requests, device, options), data_changed);
        CHECK(resource->allocated == resource->deallocated);
        CHECK_THROWS_WITH_AS(load_tensors(path, device), doctest::Contains("a.safetensors"), format_error);
        std::ofstream(folder / "text.safetensors") << "no tensors";
        CHECK_THROWS_AS(load_tensors(folder / "text.safetensors", device), format_error);
    });
}

namespace {

/// Fails after some allocations.
class failing_resource final : public memory_resource {
 public:
    explicit failing_resource(int allocations) : left_(allocations) {}
    std::byte* allocate(std::uint64_t size_bytes, stream_view stream) override {
        if (left_-- == 0) throw device_error("no memory is left");
        return counted.allocate(size_bytes, stream);
    }
    void deallocate(std::byte* data, std::uint64_t size_bytes, stream_view stream) noexcept override {
        counted.deallocate(data, size_bytes, stream);
    }
    counting_resource counted;

 private:
    int left_;
};

}  // namespace

TEST_CASE("load: without a working directory, a relative path is a file that does not exist") {
    const temporary_folder folder;
    const auto home = std::filesystem::current_path();
    const std::filesystem::path gone = folder / "gone";
    std::filesystem::create_directory(gone);
    std::filesystem::current_path(gone);
    std::filesystem::remove(gone);
    CHECK_THROWS_AS(tensor_files({"a.safetensors"}), system_failure);
    std::filesystem::current_path(home);
}

TEST_CASE("load: if memory is exhausted midway, the error is that of the resource, and all memory is freed") {
    const temporary_folder folder;
    std::vector<model_tensor> tensors;
    for (int i = 0; i < 6; ++i)
        tensors.push_back(random_tensor(std::to_string(i), dtype::of<float>(), {2'000'000}));
    write_model(folder / "a.safetensors", tensors);
    on_each_device([&](const device& device) {
        for (const int allocations : {0, 1, 4, 5}) {
            const auto resource = std::make_shared<failing_resource>(allocations);
            load_options options;
            options.resource = resource;
            options.dtype = dtype::of<double>();  // so that the host device takes memory, too
            CHECK_THROWS_AS(load_tensors(folder / "a.safetensors", device, options), device_error);
            CHECK(resource->counted.allocated == allocations);
            CHECK(resource->counted.deallocated == allocations);
        }
    });
}
