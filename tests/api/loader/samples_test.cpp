#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "samples.hpp"
#include "sanitized.hpp"
#include "temporary_folder.hpp"

// Samples of several arrays with different kinds of rows.
using namespace pinflow;

namespace {

/// No multiple of any batch size but 1, so that epochs end with a smaller batch.
constexpr std::uint64_t row_count = sanitized ? 101 : 301;

struct kind_of_sample {
    std::string name;
    std::function<known_sample(const temporary_folder& folder, std::mt19937_64& random)> make;
};

const std::vector<kind_of_sample> every_kind{
    {"8 bytes beside 256 KiB",
     [](const auto& folder, auto& random) -> known_sample {
         return {npy_file(folder / "labels.npy", "<f8", {row_count}, random),
                 npy_file(folder / "images.npy", "<f4", {row_count, 256, 256}, random)};
     }},
    {"3 KiB beside 8 bytes beside 1 byte",
     [](const auto& folder, auto& random) -> known_sample {
         return {npy_file(folder / "images.npy", "|u1", {row_count, 3, 32, 32}, random),
                 npy_file(folder / "labels.npy", "<i8", {row_count}, random),
                 npy_file(folder / "masks.npy", "|i1", {row_count, 1}, random)};
     }},
    {"big-endian labels",
     [](const auto& folder, auto& random) -> known_sample {
         return {npy_file(folder / "images.npy", "<f4", {row_count, 768}, random),
                 npy_file(folder / "labels.npy", ">i4", {row_count}, random)};
     }},
    {"big-endian rows beside labels",
     [](const auto& folder, auto& random) -> known_sample {
         return {npy_file(folder / "rows.npy", ">c16", {row_count, 33}, random),
                 npy_file(folder / "labels.npy", "<u2", {row_count}, random)};
     }},
    {"a field of a structured array as labels",
     [](const auto& folder, auto& random) -> known_sample {
         return {npy_file(folder / "rows.npy", "<f2", {row_count, 2048}, random),
                 npy_label_field(folder / "labels.npy", row_count, random)};
     }},
    {"an array in memory beside a file",
     [](const auto& folder, auto& random) -> known_sample {
         return {array_in_memory(row_count, 100, random),
                 npy_file(folder / "rows.npy", "<f4", {row_count, 3072}, random)};
     }},
    {"small rows of a source of one's own beside a file",
     [](const auto& folder, auto& random) -> known_sample {
         return {npy_file(folder / "rows.npy", "<f4", {row_count, 1024}, random),
                 rows_of_own(row_count, 24, random)};
     }},
    {"large rows of a source of one's own beside a file",
     [](const auto& folder, auto& random) -> known_sample {
         return {rows_of_own(row_count, 12'288, random),
                 npy_file(folder / "labels.npy", "<i8", {row_count}, random)};
     }},
    {"overlapping windows of a file beside labels",
     [](const auto& folder, auto& random) -> known_sample {
         npy_file(folder / "tokens.npy", "<u2", {row_count * 16 + 50}, random);
         return {windows_of(open_npy(folder / "tokens.npy"), 65, 16),
                 npy_file(folder / "labels.npy", "<i8", {row_count}, random)};
     }},
    {"overlapping windows of 64 KiB in memory",
     [](const auto& /*folder*/, auto& random) -> known_sample {
         const std::uint64_t length = 65'536, step = 4096;
         auto memory = memory_region::anonymous((row_count - 1) * step + length);
         std::ranges::copy(random_bytes(memory.size_bytes(), random), memory.data());
         const std::uint64_t size = memory.size_bytes();
         return {windows_of(array(std::move(memory), dtype::of<std::uint8_t>(), {size}), length, step)};
     }},
    {"every third row of a file, as a pair with the next row and alone",
     [](const auto& folder, auto& random) -> known_sample {
         npy_file(folder / "rows.npy", "<f4", {row_count * 3, 64}, random);
         const array rows = open_npy(folder / "rows.npy");
         return {windows_of(rows, 2, 3), windows_of(rows, 1, 3)};
     }},
    {"one array twice",
     [](const auto& folder, auto& random) -> known_sample {
         const known_array array = npy_file(folder / "rows.npy", "<f4", {row_count, 128}, random);
         return {array, array};
     }},
};

/// Calls `body(sample, device)` with every kind of sample.
template <typename Body>
void for_every_kind(Body body) {
    for (const kind_of_sample& kind : every_kind) {
        INFO("a sample of " << kind.name);
        const temporary_folder folder;
        std::mt19937_64 random(1);
        const known_sample sample = kind.make(folder, random);
        on_each_device([&](const device& device) { body(sample, device); });
    }
}

}  // namespace

TEST_CASE("samples: arrays of any sizes and kinds come together, in batches of any size and in any order") {
    for_every_kind([](const known_sample& sample, const device& device) {
        for (const order order : every_plain_order) {
            for (const std::uint64_t batch_rows : {1U, 37U, 64U, 256U}) {
                loader_options options = options_for(device, order);
                options.batch_rows = batch_rows;
                options.slots = 3;
                check_every_batch(sample, options);
            }
        }
    });
}

TEST_CASE("samples: arrays of any sizes and kinds come together, by every route that they can take") {
    for_every_kind([](const known_sample& sample, const device& device) {
        for (const order order : every_plain_order) {
            for (const route route : routes_of(sample, device, order)) {
                loader_options options = options_for(device, order);
                options.batch_rows = 37;
                options.route = route;
                options.slots = 3;
                check_every_batch(sample, options);
            }
        }
    });
}

TEST_CASE("samples: arrays stay together over several epochs") {
    for_every_kind([](const known_sample& sample, const device& device) {
        loader_options options = options_for(device, order::shuffled);
        options.batch_rows = 64;
        options.epochs = 3;
        check_every_batch(sample, options);
    });
}
