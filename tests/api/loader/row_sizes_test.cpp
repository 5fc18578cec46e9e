#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>

#include "pinflow/loader/loader.hpp"
#include "samples.hpp"
#include "sanitized.hpp"
#include "temporary_folder.hpp"

// Rows of many sizes, in batches of many sizes, with many numbers of slots.
using namespace pinflow;

namespace {

constexpr std::array<std::uint64_t, 8> every_row_size{1, 8, 100, 512, 3000, 4096, 12'288, 65'536};

/// Rows of some 2 MiB in all, but at least 67 and at most 3001 rows; fewer under a sanitizer.
std::uint64_t row_count_for(std::uint64_t row_bytes) {
    const std::uint64_t max_bytes = std::uint64_t{sanitized ? 1 : 2} << 20;
    return std::clamp<std::uint64_t>(max_bytes / row_bytes, 67, sanitized ? 501 : 3001);
}

/// Calls `body(sample, device)` with a file of rows of each size, on each device.
template <typename Body>
void for_every_row_size(std::uint64_t seed, Body body) {
    for (const std::uint64_t row_bytes : every_row_size) {
        CAPTURE(row_bytes);
        std::mt19937_64 random(seed * 1'000'003 + row_bytes);
        const temporary_folder folder;
        const std::uint64_t row_count = row_count_for(row_bytes);
        const known_sample sample{npy_file(folder / "rows.npy", "|u1", {row_count, row_bytes}, random)};
        on_each_device([&](const device& device) { body(sample, device); });
    }
}

}  // namespace

TEST_CASE("row sizes: rows of any size come through any number of slots, in small and in large batches") {
    for_every_row_size(6, [](const known_sample& sample, const device& device) {
        for (const order order : {order::sequential, order::shuffled}) {
            for (const std::uint64_t batch_rows : {3U, 64U, 1000U}) {
                for (const unsigned slots : {2U, 3U, 8U, 40U}) {
                    if (sanitized && slots == 8) continue;
                    loader_options options = options_for(device, order);
                    options.batch_rows = batch_rows;
                    options.slots = slots;
                    options.threads = slots % 2 == 0 ? 4 : 1;
                    check_every_batch(sample, options);
                }
            }
        }
    });
}

TEST_CASE("row sizes: rows of any size come by every route, by one thread and by four") {
    for_every_row_size(7, [](const known_sample& sample, const device& device) {
        for (const order order : {order::sequential, order::shuffled}) {
            for (const route route : routes_of(sample, device, order)) {
                for (const unsigned threads : {1U, 4U}) {
                    loader_options options = options_for(device, order);
                    options.batch_rows = 50;
                    options.route = route;
                    options.slots = 5;
                    options.threads = threads;
                    check_every_batch(sample, options);
                }
            }
        }
    });
}

TEST_CASE("row sizes: slots fit into the allowed memory, and rows are delivered with any number of slots") {
    for_every_row_size(8, [](const known_sample& sample, const device& device) {
        constexpr std::uint64_t batch_rows = 20;
        const std::uint64_t batch_bytes = batch_rows * sample[0].source->row_size_bytes();
        for (const order order : {order::sequential, order::shuffled}) {
            for (const route route : routes_of(sample, device, order)) {
                // on a GPU a slot may take memory on both sides, and lists of its rows
                for (const std::uint64_t batches : {5U, 12U}) {
                    loader_options options = options_for(device, order);
                    options.batch_rows = batch_rows;
                    options.route = route;
                    options.memory_bytes = batches * (batch_bytes + 1024);
                    CAPTURE(to_string(route));
                    loader loader(sources_of(sample), options);
                    const loader_report report = loader.report();
                    CHECK(report.slots >= 2);
                    // views of the mapping take none
                    if (device.kind() != device_kind::host || route != route::direct)
                        CHECK(report.slots * report.slot_bytes <= options.memory_bytes);
                    check_every_batch(loader, sample, options);
                }
            }
        }
    });
}

TEST_CASE("row sizes: a batch may be larger than the data, and an epoch one batch") {
    for_every_row_size(9, [](const known_sample& sample, const device& device) {
        const std::uint64_t row_count = sample[0].source->row_count();
        for (const std::uint64_t batch_rows : {row_count, row_count + 1, std::uint64_t{1} << 40}) {
            loader_options options = options_for(device, order::shuffled);
            options.batch_rows = batch_rows;
            options.epochs = 3;
            options.slots = 2;
            check_every_batch(sample, options);
        }
    });
}
