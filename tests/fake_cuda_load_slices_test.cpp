#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/load.hpp"
#include "src/device/page_releaser.hpp"
#include "tests/load_backend.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

// Loads of slices with gaps between their bytes, to a device that page-locks.

using namespace pinflow;

namespace {

/// A slice along axis 1 of a tensor of bytes.
struct sliced_tensor {
    shape_vector shape;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

/// Writes tensors, loads the requested slices of them, and checks their bytes.
load_report check_load(load_backend& backend, const std::vector<model_tensor>& model,
                       const std::vector<tensor_request>& requests, const load_options& options) {
    const temporary_folder folder;
    write_model(folder / "a.safetensors", model);
    const tensor_files files({folder / "a.safetensors"});
    const loaded_tensors loaded = files.load(requests, backend.device(), options);
    for (std::size_t i = 0; i < model.size(); ++i) {
        CAPTURE(i);
        CHECK(bytes_of(loaded.tensors[i]) == part_of(model[i], requests[i]));
    }
    CHECK(loaded.report.copied_bytes + loaded.report.staged_bytes == loaded.report.size_bytes);
    detail::wait_for_released_pages();
    CHECK(backend.lock.locked.empty());
    CHECK(backend.cut_strided_copies == 0);
    return loaded.report;
}

/// Loads a slice of each tensor along axis 1, and checks its bytes.
load_report check_slices(load_backend& backend, const std::vector<sliced_tensor>& slices,
                         const load_options& options) {
    std::vector<model_tensor> model;
    std::vector<tensor_request> requests;
    for (const sliced_tensor& each : slices) {
        model.push_back(
            random_tensor(fmt::format("w{}", model.size()), dtype::of<std::uint8_t>(), each.shape));
        requests.push_back({.name = model.back().name,
                            .slice = tensor_slice{.axis = 1, .begin = each.begin, .end = each.end}});
    }
    const load_report report = check_load(backend, model, requests, options);
    CHECK(backend.short_strided_copies == 0);
    return report;
}

/// Registers pieces of 3 MiB.
load_options options_of(load_route route) {
    load_options options;
    options.route = route;
    options.pin_budget_bytes = std::uint64_t{48} << 20;
    return options;
}

}  // namespace

TEST_CASE("load: short runs of a slice travel in strided copies from page-locked pages") {
    for (const load_route route : {load_route::copy, load_route::both, load_route::staged}) {
        CAPTURE(to_string(route));
        load_backend& backend = new_backend();
        // unaligned runs, whole pages, the longest short runs, the shortest runs
        const load_report report = check_slices(backend,
                                                {{{900, 8191}, 17, 4100},
                                                 {{800, 8192}, 4096, 8192},
                                                 {{60, 100'003}, 1, 49'151},
                                                 {{60'000, 100}, 36, 100}},
                                                options_of(route));
        CHECK(backend.strided_bytes > 0);  // also of runs that are staged with the gaps between them
        if (route == load_route::staged) CHECK(report.copied_bytes == 0);
        if (route != load_route::copy) continue;
        CHECK(report.copied_bytes == backend.strided_bytes);
        CHECK(report.copied_bytes > report.size_bytes - (std::uint64_t{1} << 20));
    }
}

TEST_CASE("load: long runs of a slice are copied one by one, without the pages of long gaps between them") {
    for (const load_route route : {load_route::copy, load_route::both}) {
        CAPTURE(to_string(route));
        load_backend& backend = new_backend();
        std::uint64_t locked_bytes = 0;
        backend.lock.refuse = [&](std::span<const std::byte> pages, bool) {
            locked_bytes += pages.size();
            return false;
        };
        const load_report report =
            check_slices(backend, {{{3, 4'000'001}, 3, 1'500'000}, {{6, 2'000'000}, 500'000, 1'000'007}},
                         options_of(route));
        CHECK(backend.strided_bytes == 0);
        CHECK(locked_bytes >= report.copied_bytes);
        CHECK(locked_bytes <= report.size_bytes + std::uint64_t{2 * 9} * detail::page);
        if (route == load_route::copy) CHECK(report.copied_bytes == report.size_bytes);
    }
}

TEST_CASE("load: short gaps between long runs are page-locked by the same calls") {
    load_backend& backend = new_backend();
    std::atomic<unsigned> calls = 0;
    backend.lock.refuse = [&](std::span<const std::byte>, bool) {
        ++calls;
        return false;
    };
    check_slices(backend, {{{10, 1'800'000}, 0, 1'200'000}, {{30, 200'000}, 9, 99'000}},
                 options_of(load_route::copy));
    CHECK(calls <= 9);  // of 3 MiB
}

TEST_CASE("load: slices that are not worth page-locking are staged, and the route copy is refused") {
    load_backend& backend = new_backend();
    // an eighth of each row, and runs of 32 bytes
    const std::vector<sliced_tensor> slices{{{1100, 8192}, 1024, 2048}, {{100'000, 64}, 0, 32}};
    const load_report report = check_slices(backend, slices, options_of(load_route::both));
    CHECK(report.copied_bytes == 0);
    CHECK_THROWS_AS(check_slices(backend, slices, options_of(load_route::copy)), unsupported);
}

TEST_CASE("load: random slices of random tensors are loaded, from pages and through buffers") {
    std::mt19937_64 random(20261129);
    const auto below = [&](std::uint64_t limit) { return random() % limit; };
    const auto power = [&](unsigned first, unsigned last) {  // about 2^first to 2^last
        const std::uint64_t at_least = std::uint64_t{1} << (first + below(last - first));
        return at_least + below(at_least);
    };
    std::uint64_t copied_bytes = 0, strided_bytes = 0, staged_strided_bytes = 0;
    for (unsigned round = 0; round < 12; ++round) {
        CAPTURE(round);
        std::vector<model_tensor> model;
        std::vector<tensor_request> requests;
        std::vector<std::vector<std::byte>> destinations;
        const bool is_copied = round % 3 == 0;  // by the copy engine alone
        while (model.size() < 3) {
            // runs and gaps of all lengths, of 64 KiB to 4 MiB in all
            const dtype type = below(2) == 0 ? dtype::of<std::uint8_t>() : dtype::of<std::int16_t>();
            const std::uint64_t run = power(is_copied ? 7 : 5, 20);
            // elements of an index of the sliced axis
            const std::uint64_t index = std::max<std::uint64_t>(run / (1 + below(8)), 1);
            const std::uint64_t chosen = std::max<std::uint64_t>(run / index, 1);
            const std::uint64_t length = chosen + below(chosen * (is_copied ? 2 : 5) + 1);
            const std::uint64_t total = power(is_copied ? 20 : 16, 21);
            const std::uint64_t count = (total + chosen * index - 1) / (chosen * index);
            const shape_vector shape{1 + below(2), count, length, index};
            model.push_back(random_tensor(fmt::format("t{}", model.size()), type, shape, round));
            const std::uint64_t begin = below(length - chosen + 1);
            requests.push_back({.name = model.back().name,
                                .slice = tensor_slice{.axis = 2, .begin = begin, .end = begin + chosen}});
            if (below(3) != 0) continue;
            destinations.emplace_back(shape[0] * count * chosen * index * type.size_bytes());
            requests.back().destination = destinations.back().data();
        }
        load_backend& backend = new_backend();
        load_options options;
        options.route = is_copied ? load_route::copy : round % 3 == 1 ? load_route::both : load_route::staged;
        options.threads = round % 2;
        options.pin_budget_bytes = std::uint64_t{is_copied ? 96U : 8U} << 20;  // pieces of 6 and 1 MiB
        copied_bytes += check_load(backend, model, requests, options).copied_bytes;
        (options.route == load_route::staged ? staged_strided_bytes : strided_bytes) += backend.strided_bytes;
    }
    CHECK(copied_bytes > 0);
    CHECK(strided_bytes > 0);
    CHECK(staged_strided_bytes > 0);
}

TEST_CASE("load: large groups of runs of a box travel in strided copies from page-locked pages") {
    load_backend& backend = new_backend();
    const std::vector<model_tensor> model{random_tensor("w", dtype::of<std::uint8_t>(), {3, 40, 60, 3000})};
    const std::vector<tensor_request> requests{
        {.name = "w", .further_slices = {{0, 1, 3}, {3, 100, 2100}, {1, 5, 35}}}};
    const load_report report = check_load(backend, model, requests, options_of(load_route::copy));
    CHECK(report.copied_bytes > report.size_bytes / 2);
    CHECK(backend.strided_bytes > report.size_bytes / 2);
}

TEST_CASE("load: random boxes of random tensors are loaded, from pages and through buffers") {
    std::mt19937_64 random(20261130);
    const auto below = [&](std::uint64_t limit) { return random() % limit; };
    std::uint64_t staged_strided_bytes = 0;
    for (unsigned round = 0; round < (sanitized ? 9 : 24); ++round) {
        CAPTURE(round);
        std::vector<model_tensor> model;
        std::vector<tensor_request> requests;
        while (model.size() < 3) {
            const dtype type = below(2) == 0 ? dtype::of<std::uint8_t>() : dtype::of<std::int16_t>();
            // with runs and groups of all lengths, of 1 to 4 MiB in all
            shape_vector shape{1 + below(4), 1 + below(60), std::uint64_t{1} << below(8), 0};
            shape[3] = std::max<std::uint64_t>((2U << 20U) / (shape[0] * shape[1] * shape[2]), 5);
            model.push_back(random_tensor(fmt::format("t{}", model.size()), type, shape, round));
            tensor_request& request = requests.emplace_back();
            request.name = model.back().name;
            for (std::size_t axis = 0; axis < shape.size(); ++axis) {
                if (below(3) == 0) continue;
                const std::uint64_t begin = below(shape[axis] / 3 + 1);
                const std::uint64_t end = shape[axis] - below(shape[axis] / 3 + 1);
                if (!request.slice && below(2) == 0) {
                    request.slice = tensor_slice{axis, begin, end};
                } else {
                    request.further_slices.push_back({axis, begin, end});
                }
            }
        }
        load_backend& backend = new_backend();
        load_options options;
        options.route = round % 3 == 0 ? load_route::both : load_route::staged;
        options.threads = round % 2;
        options.pin_budget_bytes = std::uint64_t{8} << 20;
        check_load(backend, model, requests, options);
        if (options.route == load_route::staged) staged_strided_bytes += backend.strided_bytes;
        const temporary_folder folder;
        write_model(folder / "a.safetensors", model);
        const tensor_files files({folder / "a.safetensors"});
        const loaded_tensors on_host = files.load(requests, device::host());
        for (std::size_t i = 0; i < model.size(); ++i)
            CHECK(bytes_of(on_host.tensors[i]) == part_of(model[i], requests[i]));
    }
    CHECK(staged_strided_bytes > 0);
}

TEST_CASE(
    "load: without page-locked memory for staging, runs across boundaries of registrations arrive, too") {
    for (const load_route route : {load_route::copy, load_route::both}) {
        load_backend& backend = new_backend();
        backend.has_pinned_memory = false;
        const load_report report = check_slices(backend, {{{3000, 8009}, 17, 4100}}, options_of(route));
        CHECK(report.staged_bytes > 0);
        CHECK(report.staged_bytes < 200'000);
    }
}

TEST_CASE("load: casts of slices are not copied from pages") {
    const temporary_folder folder;
    load_backend& backend = new_backend();
    const auto model = std::vector{counting_tensor("w", {1000, 2048})};
    write_model(folder / "a.safetensors", model);
    const tensor_request request{.name = "w",
                                 .slice = tensor_slice{.axis = 1, .begin = 100, .end = 1300},
                                 .dtype = dtype::of<double>()};
    const tensor_files files({folder / "a.safetensors"});
    const loaded_tensors loaded = files.load({&request, 1}, backend.device(), options_of(load_route::both));
    CHECK(loaded.report.copied_bytes == 0);
    std::vector<double> values(loaded.tensors[0].size_bytes() / sizeof(double));
    const std::vector<std::byte> bytes = bytes_of(loaded.tensors[0]);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const std::size_t element = i / 1200 * 2048 + 100 + i % 1200;
        if (values[i] != static_cast<double>(element % 256) - 100) ++wrong;
    }
    CHECK(wrong == 0);
}
