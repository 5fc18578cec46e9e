#include "src/core/row_locator.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

using pinflow::detail::row_locator;

namespace {

/// Whether every row is found where counting from the front finds it.
bool finds_all(const std::vector<std::uint64_t>& row_counts) {
    row_locator locator;
    for (const std::uint64_t count : row_counts) {
        if (!locator.add(count)) return false;
    }
    std::uint64_t next = 0;
    for (std::size_t part = 0; part < row_counts.size(); ++part) {
        for (std::uint64_t row = 0; row < row_counts[part]; ++row, ++next) {
            const auto found = locator.find(next);
            if (found.part != part || found.row != row) return false;
        }
    }
    return locator.row_count() == next;
}

}  // namespace

TEST_CASE("row_locator: finds every row of parts of one size, and of a last part of another size") {
    for (const std::uint64_t size : {1u, 2u, 7u, 64u}) {
        for (const std::size_t parts : {1u, 2u, 3u, 10u}) {
            std::vector<std::uint64_t> row_counts(parts, size);
            CHECK(finds_all(row_counts));
            for (const std::uint64_t last : {0u, 1u, 5u, 200u}) {
                row_counts.back() = last;
                CHECK(finds_all(row_counts));
            }
        }
    }
}

TEST_CASE("row_locator: finds every row of parts of different sizes, some of them empty") {
    CHECK(finds_all({}));
    CHECK(finds_all({0}));
    CHECK(finds_all({0, 0, 3}));
    CHECK(finds_all({0, 3, 3, 3}));
    CHECK(finds_all({3, 0, 3}));
    CHECK(finds_all({3, 3, 0, 0}));
    CHECK(finds_all({3, 3, 2, 3}));
    CHECK(finds_all({3, 3, 4, 2, 3}));
    std::mt19937_64 random(1);
    for (int round = 0; round < 500; ++round) {
        std::vector<std::uint64_t> row_counts(random() % 12);
        for (std::uint64_t& count : row_counts)
            count = random() % 4 == 0 ? 0 : random() % 9;
        CHECK(finds_all(row_counts));
    }
}

TEST_CASE("row_locator: more rows than can be numbered are refused") {
    constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();
    row_locator locator;
    CHECK(locator.add(largest - 5));
    CHECK_FALSE(locator.add(6));
    CHECK(locator.row_count() == largest - 5);
    CHECK(locator.add(5));
    CHECK(locator.row_count() == largest);
    CHECK(locator.find(largest - 6).part == 0);
    CHECK(locator.find(largest - 5).part == 1);
    CHECK(locator.find(largest - 1).row == 4);

    row_locator halves;
    CHECK(halves.add(std::uint64_t{1} << 63));
    CHECK_FALSE(halves.add(std::uint64_t{1} << 63));
}
