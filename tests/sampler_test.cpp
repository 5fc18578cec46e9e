#include "pinflow/loader/sampler.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

using namespace pinflow;

namespace {

std::vector<std::uint64_t> epoch_of(const sampler& sampler, std::uint64_t epoch) {
    std::vector<std::uint64_t> rows(sampler.row_count());
    sampler.rows_at(epoch, 0, rows);
    return rows;
}

}  // namespace

TEST_CASE("sampler: sequential is the order of the file, in every epoch") {
    const sampler sampler(order::sequential, 10, 3);
    std::vector<std::uint64_t> expected(10);
    std::iota(expected.begin(), expected.end(), 0);
    CHECK(epoch_of(sampler, 0) == expected);
    CHECK(epoch_of(sampler, 5) == expected);
}

TEST_CASE("sampler: shuffled takes every row once, differently in every epoch and for every seed") {
    const sampler first(order::shuffled, 1000, 1);
    const sampler second(order::shuffled, 1000, 2);
    std::vector<std::vector<std::uint64_t>> orders{epoch_of(first, 0), epoch_of(first, 1),
                                                   epoch_of(second, 0), epoch_of(second, 1)};
    std::vector<std::uint64_t> all(1000);
    std::iota(all.begin(), all.end(), 0);
    for (std::size_t i = 0; i < orders.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            CHECK(orders[i] != orders[j]);
        }
        std::vector<std::uint64_t> sorted = orders[i];
        std::ranges::sort(sorted);
        CHECK(sorted == all);
    }
    CHECK(epoch_of(first, 0) == orders[0]);
}

TEST_CASE("sampler: a row at a position does not depend on how the positions are asked for") {
    const sampler sampler(order::shuffled, 777, 9);
    const auto whole = epoch_of(sampler, 4);
    for (const std::size_t piece : {1U, 10U, 64U, 776U}) {
        std::vector<std::uint64_t> rows;
        while (rows.size() < whole.size()) {
            std::vector<std::uint64_t> part(std::min(piece, whole.size() - rows.size()));
            sampler.rows_at(4, rows.size(), part);
            rows.insert(rows.end(), part.begin(), part.end());
        }
        CHECK(rows == whole);
    }
}

TEST_CASE("sampler: seed and epoch give these rows for ever") {
    std::vector<std::uint64_t> rows(4);
    sampler(order::shuffled, 1797, 0).rows_at(0, 0, rows);
    CHECK(rows == std::vector<std::uint64_t>{1685, 620, 497, 592});
    sampler(order::shuffled, 1797, 12345).rows_at(3, 100, rows);
    CHECK(rows == std::vector<std::uint64_t>{1171, 1410, 538, 1641});
}
