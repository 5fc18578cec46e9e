#include "pinflow/loader/digest.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "digest_formula.hpp"
#include "pinflow/loader/loader.hpp"

using namespace pinflow;

namespace {

using rows = std::vector<std::vector<std::uint8_t>>;

std::uint64_t expected_digest(const std::vector<rows>& arrays) {
    std::uint64_t digest = 0;
    for (std::size_t sample = 0; sample < arrays[0].size(); ++sample) {
        std::vector<std::span<const std::byte>> of_sample;
        for (const rows& array : arrays)
            of_sample.push_back(std::as_bytes(std::span(array[sample])));
        digest += digest_formula::sample_hash(of_sample);
    }
    return digest;
}

array array_from(const rows& content) {
    std::vector<std::uint8_t> flat;
    for (const auto& row : content) {
        flat.insert(flat.end(), row.begin(), row.end());
    }
    return array_of(flat, {content.size(), content.empty() ? 0 : content[0].size()});
}

std::uint64_t streamed_digest(std::vector<std::shared_ptr<const row_source>> sources,
                              const loader_options& options) {
    loader loader(std::move(sources), options);
    const stream streams[] = {stream(options.device), stream(options.device)};
    digest digest(options.device);
    for (std::size_t turn = 0;; ++turn) {
        const stream_view stream = streams[turn % 2];
        const auto batch = loader.next(stream);
        if (!batch) return digest.value();
        digest.add_async(*batch, stream);
    }
}

rows random_rows(std::size_t count, std::size_t size_bytes, unsigned seed) {
    std::mt19937_64 random(seed);
    rows content(count, std::vector<std::uint8_t>(size_bytes));
    for (auto& row : content) {
        for (auto& byte : row) {
            byte = static_cast<std::uint8_t>(random());
        }
    }
    return content;
}

}  // namespace

TEST_CASE("digest: equals known values") {
    on_each_device([](const device& device) {
        const loader_options options{.device = device};
        CHECK(streamed_digest({array_from({{0, 1, 2}, {3, 4, 5}})}, options) == 0xc5121eb0e0166a0a);
        CHECK(streamed_digest({array_from({{0, 1, 2, 3, 4, 5, 6, 7, 8}})}, options) == 0xe87e5cfe1c1f92ad);
        CHECK(streamed_digest({array_from({{}})}, options) == 0x48218226ff3cd4bf);
        CHECK(streamed_digest({array_from({})}, options) == 0);
    });
}

TEST_CASE("digest: equals its definition for rows of any size, and for several arrays") {
    on_each_device([](const device& device) {
        const loader_options options{.device = device, .batch_rows = 7};
        for (const std::size_t size : {0U, 1U, 7U, 8U, 9U, 63U, 64U, 100U, 1000U, 4099U, 70'001U}) {
            CAPTURE(size);
            const rows content = random_rows(23, size, 1);
            CHECK(streamed_digest({array_from(content)}, options) == expected_digest({content}));
            const rows labels = random_rows(23, 3, 2);
            CHECK(streamed_digest({array_from(content), array_from(labels)}, options) ==
                  expected_digest({content, labels}));
        }
        const rows few_and_long = random_rows(2, 3'000'005, 3);
        CHECK(streamed_digest({array_from(few_and_long)}, options) == expected_digest({few_and_long}));
        const rows many_and_short = random_rows(20'000, 5, 4);
        CHECK(streamed_digest({array_from(many_and_short)}, {.device = device, .batch_rows = 9000}) ==
              expected_digest({many_and_short}));
    });
}

TEST_CASE("digest: is the same for every order, batch size, slot count, thread count and route") {
    on_each_device([](const device& device) {
        const rows content = random_rows(100, 37, 5);
        const rows labels = random_rows(100, 2, 6);
        const std::uint64_t expected = expected_digest({content, labels});
        for (const std::uint64_t batch_rows : {1U, 3U, 64U, 100U, 1000U}) {
            for (const unsigned slots : {2U, 5U}) {
                for (const order order : {order::sequential, order::shuffled}) {
                    for (const route route : {route::automatic, route::staged}) {
                        const loader_options options{.device = device,
                                                     .batch_rows = batch_rows,
                                                     .order = order,
                                                     .seed = slots,
                                                     .route = route,
                                                     .slots = slots,
                                                     .threads = slots - 1};
                        CHECK(streamed_digest({array_from(content), array_from(labels)}, options) ==
                              expected);
                    }
                }
            }
        }
        CHECK(streamed_digest({array_from(content), array_from(labels)}, {.device = device, .epochs = 3}) ==
              3 * expected);
    });
}

TEST_CASE("digest: differs after swapped words, swapped labels, a changed bit or swapped arrays") {
    on_each_device([](const device& device) {
        const loader_options options{.device = device};
        const rows content = random_rows(10, 16, 7);
        const rows labels = random_rows(10, 1, 8);
        const std::uint64_t whole = streamed_digest({array_from(content), array_from(labels)}, options);
        rows words = content;
        std::swap_ranges(words[4].begin(), words[4].begin() + 8, words[4].begin() + 8);
        CHECK(streamed_digest({array_from(words), array_from(labels)}, options) != whole);
        rows bit = content;
        bit[9][15] ^= 1;
        CHECK(streamed_digest({array_from(bit), array_from(labels)}, options) != whole);
        rows mixed = labels;
        REQUIRE(mixed[0] != mixed[1]);
        std::swap(mixed[0], mixed[1]);
        CHECK(streamed_digest({array_from(content), array_from(mixed)}, options) != whole);
        CHECK(streamed_digest({array_from(labels), array_from(content)}, options) != whole);
    });
}

TEST_CASE("digest: rows without bytes count on each device") {
    on_each_device([](const device& device) {
        const array nothing = array_of<std::uint8_t>({}, {5, 0});
        const std::uint64_t of_one_row = 0x48218226ff3cd4bfU;
        CHECK(streamed_digest({nothing.rows()}, {.device = device, .batch_rows = 2}) == 5 * of_one_row);
    });
}
