#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "digest_formula.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "samples.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

namespace {

/// The bytes of a file after its header.
std::vector<std::byte> elements_in(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const auto bytes = std::as_bytes(std::span(text));
    const auto elements = bytes.subspan(parse_npy_header(bytes, bytes.size()).data_offset_bytes);
    return {elements.begin(), elements.end()};
}

}  // namespace

TEST_CASE("digest: an epoch has the digest of the files' bytes, by every route, order and batch size") {
    std::mt19937_64 random(20);
    for (const std::uint64_t row_bytes : {8U, 3000U, 65'536U}) {
        CAPTURE(row_bytes);
        constexpr std::uint64_t row_count = 201;
        const temporary_folder folder;
        known_sample sample{npy_file(folder / "rows.npy", "|u1", {row_count, row_bytes}, random),
                            npy_file(folder / "labels.npy", "<i8", {row_count}, random),
                            npy_file(folder / "masks.npy", "|u1", {row_count}, random)};
        sample[0].content = elements_in(folder / "rows.npy");
        sample[1].content = elements_in(folder / "labels.npy");
        sample[2].content = elements_in(folder / "masks.npy");
        const std::uint64_t expected = expected_digest(sample);
        on_each_device([&](const device& device) {
            for (const order order : every_plain_order) {
                for (const route route : routes_of(sample, device, order)) {
                    for (const std::uint64_t batch_rows : {10U, 64U}) {
                        INFO("route " << to_string(route) << ", order " << to_string(order) << ", batches of "
                                      << batch_rows);
                        loader_options options = options_for(device, order);
                        options.batch_rows = batch_rows;
                        options.route = route;
                        options.slots = 3;
                        loader loader(sources_of(sample), options);
                        CHECK(digest_of(loader) == expected);
                    }
                }
            }
        });
    }
}

TEST_CASE("digest: converted or decoded samples have the digest of the delivered bytes") {
    std::mt19937_64 random(21);
    constexpr std::uint64_t row_count = 150;
    const temporary_folder folder;
    const known_sample sample{npy_file(folder / "rows.npy", ">f4", {row_count, 25}, random),
                              npy_label_field(folder / "labels.npy", row_count, random),
                              rows_of_own(row_count, 13, random), array_in_memory(row_count, 3, random)};
    const std::uint64_t expected = expected_digest(sample);
    on_each_device([&](const device& device) {
        for (const order order : every_plain_order) {
            loader_options options = options_for(device, order);
            options.epochs = 2;
            loader loader(sources_of(sample), options);
            CHECK(digest_of(loader) == 2 * expected);
        }
    });
}

TEST_CASE("digest: the digests of any number of ranks add up to the epoch's digest") {
    std::mt19937_64 random(22);
    constexpr std::uint64_t row_count = 203;
    const temporary_folder folder;
    const known_sample sample{npy_file(folder / "rows.npy", "<f4", {row_count, 100}, random),
                              npy_file(folder / "labels.npy", "<i4", {row_count}, random)};
    const std::uint64_t expected = expected_digest(sample);
    on_each_device([&](const device& device) {
        for (const order order : every_plain_order) {
            for (const unsigned world : {2U, 3U, 7U}) {
                std::uint64_t sum = 0;
                for (unsigned rank = 0; rank < world; ++rank) {
                    loader_options options = options_for(device, order);
                    options.batch_rows = 10;
                    options.shard = {rank, world};
                    loader loader(sources_of(sample), options);
                    sum += digest_of(loader);
                }
                CHECK(sum == expected);
            }
        }
    });
}
