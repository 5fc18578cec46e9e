#include "src/cli/bench_words.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

using namespace pinflow::cli;

TEST_CASE("bench words: any part of the filled bytes matches, until one of its bytes changes") {
    constexpr std::uint64_t size_bytes = (std::uint64_t{1} << 20) + 13;  // more than one task
    constexpr std::uint64_t seed = 7;
    std::vector<std::byte> filled(size_bytes);
    fill_with_words(filled, seed);
    for (const std::uint64_t place : {std::uint64_t{0}, std::uint64_t{3}, std::uint64_t{8},
                                      (std::uint64_t{1} << 20) - 5, size_bytes - 1}) {
        for (const std::uint64_t length : {1U, 7U, 8U, 9U, 100U}) {
            CAPTURE(place);
            CAPTURE(length);
            const auto piece =
                std::span(filled).subspan(place, std::min<std::uint64_t>(length, size_bytes - place));
            CHECK(has_words(piece, place, seed));
            for (std::byte& byte : piece) {
                byte ^= std::byte{1};
                CHECK_FALSE(has_words(piece, place, seed));
                byte ^= std::byte{1};
            }
        }
    }
    CHECK(has_words({}, 5, seed));
    CHECK_FALSE(has_words(std::span(filled).first(100), 0, seed + 1));
    CHECK_FALSE(has_words(std::span(filled).first(100), 8, seed));
}
