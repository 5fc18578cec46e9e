#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/loader/sampler.hpp"
#include "tests/chi_square.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_lists.hpp"

using namespace pinflow;

namespace {

using weight_list = std::vector<double>;

row_list counts_of(const weight_list& weights, std::uint64_t draws, std::uint64_t seed) {
    row_list counts(weights.size());
    for (const std::uint64_t row : epoch_of(sampler::weighted(weights, draws, seed), 0)) {
        ++counts.at(row);
    }
    return counts;
}

/// Rows of less than 20 expected draws count together, as chi-square needs; those of weight 0 must not come.
void check_frequencies(const weight_list& weights, std::uint64_t seed) {
    constexpr std::uint64_t draws = 400'000;
    const row_list counts = counts_of(weights, draws, seed);
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    row_list cells(1);
    std::vector<double> expected(1);
    std::uint64_t impossible = 0;
    for (std::uint64_t row = 0; row < weights.size(); ++row) {
        const double of_row = static_cast<double>(draws) * (weights[row] / sum);
        if (weights[row] == 0) {
            impossible += counts[row];
        } else if (of_row < 20) {
            cells[0] += counts[row];
            expected[0] += of_row;
        } else {
            cells.push_back(counts[row]);
            expected.push_back(of_row);
        }
    }
    CHECK(impossible == 0);
    if (expected[0] < 20) {
        CHECK(static_cast<double>(cells[0]) < expected[0] + 40);
        cells.erase(cells.begin());
        expected.erase(expected.begin());
    }
    if (cells.size() > 1) CHECK(std::abs(deviations(cells, expected)) < 5);
}

std::string refusal(const weight_list& weights) {
    try {
        static_cast<void>(sampler::weighted(weights, 10, 0));
    } catch (const invalid_argument& refused) {
        return refused.what();
    }
    return {};
}

}  // namespace

TEST_CASE("weighted: draws every row as often as its weight says") {
    std::mt19937_64 random(4);
    const auto weights_of = [](std::uint64_t count, const auto& weight) {
        weight_list weights(count);
        for (std::uint64_t row = 0; row < count; ++row) {
            weights[row] = weight(row);
        }
        return weights;
    };
    const auto uniform = [&](std::uint64_t) { return std::uniform_real_distribution<>()(random); };
    const auto rarely = [&](std::uint64_t row) { return row % 3 == 0 ? uniform(row) : 0.0; };
    const auto spread = [&](std::uint64_t) { return std::exp(std::normal_distribution<>(0, 4)(random)); };
    check_frequencies({1, 2, 3, 4}, 0);
    check_frequencies({0, 0, 5, 0, 1e-3, 0}, 1);
    for (const std::uint64_t count : {2U, 3U, 7U, 100U, 1000U, 4096U}) {
        CAPTURE(count);
        check_frequencies(weights_of(count, [](std::uint64_t) { return 0.1; }), 2);
        check_frequencies(weights_of(count, uniform), 3);
        check_frequencies(weights_of(count, rarely), 4);
        check_frequencies(weights_of(count, spread), 5);
        check_frequencies(
            weights_of(count, [](std::uint64_t row) { return 1.0 / static_cast<double>(1 + row); }), 6);
    }
}

TEST_CASE("weighted: one row, one weight above 0, and the ends of what a double holds") {
    constexpr double tiny = std::numeric_limits<double>::denorm_min();
    constexpr double huge = std::numeric_limits<double>::max();
    CHECK(counts_of({3.5}, 1000, 0) == row_list{1000});
    CHECK(counts_of({tiny}, 1000, 0) == row_list{1000});
    CHECK(counts_of({huge}, 1000, 0) == row_list{1000});
    CHECK(counts_of({0, 0, tiny, 0}, 1000, 0) == row_list{0, 0, 1000, 0});
    CHECK(counts_of({tiny, 0, huge, tiny}, 100'000, 0) == row_list{0, 0, 100'000, 0});
    CHECK(counts_of({1, 0x1p-63}, 100'000, 0) == row_list{100'000, 0});
    check_frequencies({huge / 4, 0, huge / 4, huge / 8, tiny}, 1);
    // the sum of the large ones is infinite, and the small ones are subnormal
    const row_list of_huge = counts_of({huge, huge, huge, huge}, 100'000, 2);
    CHECK(deviations(of_huge, 25'000) < 5);
    const row_list of_tiny = counts_of({tiny, tiny, tiny, tiny}, 100'000, 2);
    CHECK(of_tiny == of_huge);
    CHECK(deviations(counts_of({tiny, 3 * tiny}, 100'000, 3), std::vector<double>{25'000, 75'000}) < 5);
    CHECK(counts_of({}, 0, 0).empty());
    CHECK(counts_of({0, 0}, 0, 0) == row_list{0, 0});
}

TEST_CASE("weighted: positions, epochs and seeds are independent of each other") {
    const weight_list weights{1, 2, 3, 4};
    constexpr std::uint64_t draws = 200'000;
    std::vector<double> expected(16);
    for (std::uint64_t pair = 0; pair < 16; ++pair) {
        expected[pair] = static_cast<double>(draws) / 2 * weights[pair / 4] * weights[pair % 4] / 100;
    }
    const auto seed_5 = sampler::weighted(weights, draws, 5);
    const row_list rows = epoch_of(seed_5, 0);
    const row_list next_epoch = epoch_of(seed_5, 1);
    const row_list next_seed = epoch_of(sampler::weighted(weights, draws, 6), 0);
    row_list neighbours(16);
    row_list epochs(16);
    row_list seeds(16);
    for (std::uint64_t position = 0; position < draws; position += 2) {
        ++neighbours[4 * rows[position] + rows[position + 1]];
        ++epochs[4 * rows[position] + next_epoch[position]];
        ++seeds[4 * rows[position] + next_seed[position]];
    }
    CHECK(deviations(neighbours, expected) < 5);
    CHECK(deviations(epochs, expected) < 5);
    CHECK(deviations(seeds, expected) < 5);
}

TEST_CASE("weighted: a row at a position does not depend on how the positions are asked for") {
    const auto sampler = sampler::weighted(weight_list{3, 1, 4, 1, 5, 9, 2, 6}, 5000, 3);
    const row_list whole = epoch_of(sampler, 7);
    for (std::uint64_t position = 0; position < whole.size(); ++position) {
        std::uint64_t row = 0;
        sampler.rows_at(7, position, {&row, 1});
        REQUIRE(row == whole[position]);
    }
}

TEST_CASE("weighted: takes its random numbers from Philox4x32-10, as published") {
    // known answers of Random123 1.14 (kat_vectors): {0, 0, 0, 0} under {0, 0} gives 6627e8d5 e169c58d
    // bc57ac4c 9b00dbd8, and the digits of pi give d16cfe09 94fdcceb 5001e420 24126ea1. Equal weights take
    // the row from the highest bits of the second number.
    const weight_list equal(65536, 1.0);
    row_list row(1);
    sampler::weighted(equal, 1, 0).rows_at(0, 0, row);
    CHECK(row[0] == 0xe169);
    sampler::weighted(equal, ~std::uint64_t{0}, 0x299f31d0a4093822)
        .rows_at(0x0370734413198a2e, 0x85a308d3243f6a88, row);
    CHECK(row[0] == 0x94fd);
}

TEST_CASE("weighted: equal proportions are one order, other weights are another") {
    const auto identity = [](const weight_list& weights, std::uint64_t seed = 0) {
        return sampler::weighted(weights, 100, seed).identity();
    };
    CHECK(identity({1, 2, 3}) == identity({1, 2, 3}));
    CHECK(identity({1, 2, 3}) == identity({0x1p-600, 0x1p-599, 0x1.8p-599}));
    CHECK(identity({1, 2, 3}) != identity({1, 3, 2}));
    CHECK(identity({1, 2, 3}) != identity({1, 2, 3.0000000001}));
    CHECK(identity({1, 2, 3}) != identity({1, 2, 3}, 1));
}

TEST_CASE("weighted: refuses invalid weights, and names the row") {
    const double infinity = std::numeric_limits<double>::infinity();
    CHECK(contains_all(refusal({1, -1e-300}),
                       {"cannot draw rows", "row 1 is -1e-300,", "finite and not negative"}));
    CHECK(refusal({1, 1, std::nan("")}).find("row 2 is nan") != std::string::npos);
    CHECK(refusal({infinity, 1}).find("row 0 is inf") != std::string::npos);
    CHECK(contains_all(refusal({0, 0, -0.0}), {"cannot draw rows", "none of the 3 ", "above 0"}));
    CHECK(contains_all(refusal({}), {"cannot draw rows", "none of the 0 ", "above 0"}));
    CHECK(refusal({-0.0, 1}).empty());
}

TEST_CASE("weighted: version 1 gives these rows for ever") {
    weight_list weights(1000);
    for (std::uint64_t row = 0; row < weights.size(); ++row) {
        weights[row] = static_cast<double>(row * row % 97) / 7;
    }
    row_list rows(8);
    const auto sampler = sampler::weighted(weights, 5000, 42);
    sampler.rows_at(0, 0, rows);
    CHECK(rows == row_list{466, 327, 657, 670, 838, 293, 743, 408});
    sampler.rows_at(3, 4992, rows);
    CHECK(rows == row_list{814, 8, 627, 163, 46, 460, 991, 821});
    CHECK(sampler.identity().content == 0xa24bbb17645d39d7);
}
