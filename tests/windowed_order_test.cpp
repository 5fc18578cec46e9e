#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/loader/sampler.hpp"
#include "tests/chi_square.hpp"
#include "tests/support/row_lists.hpp"

using namespace pinflow;

namespace {

std::uint64_t row_at(const sampler& sampler, std::uint64_t epoch, std::uint64_t position) {
    std::uint64_t row = 0;
    sampler.rows_at(epoch, position, {&row, 1});
    return row;
}

/// As the documentation says.
std::uint64_t chunk_rows_of(std::uint64_t window_rows) {
    return std::max<std::uint64_t>(1, window_rows / 16);
}

/// Random parameters of an order. The window is often near the number of rows, or near a multiple of 16,
/// where chunks get one row more.
struct parameters {
    std::uint64_t row_count;
    std::uint64_t window_rows;
    std::uint64_t seed;

    explicit parameters(std::mt19937_64& random) {
        const std::uint64_t max_rows = random() % 4 == 0 ? 40 : 3000;
        row_count = random() % max_rows;
        window_rows = 1;
        switch (random() % 4) {
            case 0:
                window_rows += random() % 70;
                break;
            case 1:
                window_rows += random() % (row_count + 1);
                break;
            case 2:
                window_rows += row_count + random() % 3;
                break;
            default:
                window_rows += random() % 20 * 16;
                break;
        }
        seed = random();
    }
    sampler make() const { return sampler::windowed(row_count, seed, window_rows); }
};

/// The lengths of the runs of consecutive rows that a window consists of, on the ring of all rows.
row_list runs_of(row_list window, std::uint64_t row_count) {
    std::ranges::sort(window);
    row_list lengths{1};
    for (std::uint64_t i = 1; i < window.size(); ++i) {
        if (window[i] == window[i - 1] + 1) {
            ++lengths.back();
        } else {
            lengths.push_back(1);
        }
    }
    if (lengths.size() > 1 && window.front() == 0 && window.back() == row_count - 1) {
        lengths.front() += lengths.back();
        lengths.pop_back();
    }
    return lengths;
}

/// Whether `rows` are windows of whole chunks, as many as `chunks_of_window` says. One chunk lacks
/// `missing_rows` rows, and is in window number `short_window`.
bool consists_of(const row_list& rows, const row_list& chunks_of_window, std::uint64_t chunk_rows,
                 std::uint64_t missing_rows, std::uint64_t short_window) {
    auto begin = rows.begin();
    for (std::uint64_t window = 0; window < chunks_of_window.size(); ++window) {
        const std::uint64_t missing = window == short_window ? missing_rows : 0;
        const auto end = begin + static_cast<std::ptrdiff_t>(chunks_of_window[window] * chunk_rows - missing);
        std::uint64_t incomplete = 0;
        for (const std::uint64_t length : runs_of({begin, end}, rows.size())) {
            if (length % chunk_rows == 0) continue;
            ++incomplete;
            if ((length + missing) % chunk_rows != 0) return false;
        }
        if (incomplete > (missing > 0 ? 1U : 0U)) return false;
        begin = end;
    }
    return begin == rows.end();
}

}  // namespace

TEST_CASE("windowed: takes every row once, whatever the sizes of data, window and seed") {
    std::mt19937_64 random(1);
    for (unsigned i = 0; i < 1000; ++i) {
        const parameters drawn(random);
        CAPTURE(drawn.row_count);
        CAPTURE(drawn.window_rows);
        row_list rows = epoch_of(drawn.make(), random());
        std::ranges::sort(rows);
        std::uint64_t wrong = 0;
        for (std::uint64_t row = 0; row < rows.size(); ++row) {
            wrong += rows[row] != row ? 1U : 0U;
        }
        REQUIRE(wrong == 0);
    }
}

TEST_CASE("windowed: a row at a position does not depend on how the positions are asked for") {
    std::mt19937_64 random(2);
    for (unsigned i = 0; i < 300; ++i) {
        const parameters drawn(random);
        CAPTURE(drawn.row_count);
        CAPTURE(drawn.window_rows);
        const sampler sampler = drawn.make();
        const std::uint64_t epoch = random() % 100;
        const row_list whole = epoch_of(sampler, epoch);
        for (unsigned piece = 0; piece < 20; ++piece) {
            const std::uint64_t first = random() % (whole.size() + 1);
            const std::uint64_t most = piece % 2 == 0 ? 1 : whole.size();
            row_list rows(std::min(random() % (most + 1), whole.size() - first));
            sampler.rows_at(epoch, first, rows);
            REQUIRE(std::equal(rows.begin(), rows.end(), whole.begin() + static_cast<std::ptrdiff_t>(first)));
        }
    }
}

TEST_CASE("windowed: windows are whole chunks, no more rows than asked for, and equal but for one chunk") {
    std::mt19937_64 random(3);
    for (unsigned i = 0; i < 400; ++i) {
        const parameters drawn(random);
        CAPTURE(drawn.row_count);
        CAPTURE(drawn.window_rows);
        const std::uint64_t chunk_rows = chunk_rows_of(drawn.window_rows);
        if (drawn.row_count <= drawn.window_rows || chunk_rows == 1) continue;  // every order passes
        const std::uint64_t chunk_count = (drawn.row_count + chunk_rows - 1) / chunk_rows;
        const std::uint64_t max_chunks = drawn.window_rows / chunk_rows;
        const std::uint64_t window_count = (chunk_count + max_chunks - 1) / max_chunks;
        row_list chunks_of_window(window_count, chunk_count / window_count);
        for (std::uint64_t window = 0; window < chunk_count % window_count; ++window) {
            ++chunks_of_window[window];
        }
        REQUIRE(chunks_of_window[0] * chunk_rows <= drawn.window_rows);
        const row_list rows = epoch_of(drawn.make(), random());
        std::uint64_t fitting = 0;
        for (std::uint64_t window = 0; window < window_count; ++window) {
            const std::uint64_t missing = chunk_count * chunk_rows - drawn.row_count;
            fitting += consists_of(rows, chunks_of_window, chunk_rows, missing, window) ? 1U : 0U;
        }
        REQUIRE(fitting >= 1);
    }
}

TEST_CASE("windowed: windows have other rows, in another order, in every epoch and for every seed") {
    std::set<row_list> sets;
    std::set<row_list> orders;
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
        const auto sampler = sampler::windowed(1024, seed, 64);
        for (std::uint64_t epoch = 0; epoch < 5; ++epoch) {
            const row_list rows = epoch_of(sampler, epoch);
            CHECK(epoch_of(sampler, epoch) == rows);
            row_list first_window(rows.begin(), rows.begin() + 64);
            std::ranges::sort(first_window);
            sets.insert(first_window);
            const row_list first_rows(rows.begin(), rows.begin() + 64);
            row_list order;
            for (const std::uint64_t row : first_rows) {
                order.push_back(
                    static_cast<std::uint64_t>(std::ranges::find(first_window, row) - first_window.begin()));
            }
            orders.insert(order);
        }
    }
    CHECK(sets.size() == 25);
    CHECK(orders.size() == 25);
}

TEST_CASE("windowed: every row comes at every position equally often, those of a short chunk as well") {
    struct {
        std::uint64_t row_count;
        std::uint64_t window_rows;
    } constexpr cases[]{{96, 32},
                        {157, 64}};  // 48 chunks of 2 rows; 39 of 4 and a single row: 3 windows each
    for (const auto& [row_count, window_rows] : cases) {
        CAPTURE(row_count);
        const auto sampler = sampler::windowed(row_count, 11, window_rows);
        std::vector<row_list> positions_of(row_count, row_list(row_count));
        for (std::uint64_t epoch = 0; epoch < row_count * 100; ++epoch) {
            const row_list rows = epoch_of(sampler, epoch);
            for (std::uint64_t position = 0; position < row_count; ++position) {
                ++positions_of[rows[position]][position];
            }
        }
        double worst = 0;
        for (const row_list& positions : positions_of) {
            worst = std::max(worst, deviations(positions, 100));
        }
        CHECK(worst < 5);
    }
}

TEST_CASE("windowed: the chunks that share a window are random across epochs and seeds") {
    // 64 chunks of 2 rows in 4 windows. Counts pairs of windows: those of two chunks, and those of one chunk
    // in two epochs or with two seeds.
    constexpr std::uint64_t trials = 20'000;
    const auto window_of = [](const row_list& rows, std::uint64_t row) {
        return static_cast<std::uint64_t>(std::ranges::find(rows, row) - rows.begin()) / 32;
    };
    row_list chunks(16);
    row_list epochs(16);
    row_list seeds(16);
    std::uint64_t of_last_seed = 0;
    for (std::uint64_t seed = 0; seed <= trials; ++seed) {
        const auto sampler = sampler::windowed(128, seed, 32);
        const row_list rows = epoch_of(sampler, 0);
        const std::uint64_t window = window_of(rows, 40);
        const std::uint64_t before = std::exchange(of_last_seed, window);
        if (seed == 0) continue;
        ++chunks[4 * window + window_of(rows, 42)];
        ++epochs[4 * window + window_of(epoch_of(sampler, 1), 40)];
        ++seeds[4 * window + before];
    }
    // of the other 63 chunks 15 are in the same window, 16 in each other one
    std::vector<double> expected(16, trials * 16.0 / 63 / 4);
    for (std::uint64_t window = 0; window < 4; ++window) {
        expected[5 * window] = trials * 15.0 / 63 / 4;
    }
    CHECK(deviations(chunks, expected) < 5);
    CHECK(deviations(epochs, trials / 16.0) < 5);
    CHECK(deviations(seeds, trials / 16.0) < 5);
}

TEST_CASE("windowed: rows that are neighbours in the data are anywhere within their window") {
    // 4 windows of 16 chunks of 2 rows. Counts the distances of rows 20 and 21 if one window has both.
    const auto sampler = sampler::windowed(128, 17, 32);
    row_list distances(31);
    std::uint64_t together = 0;
    for (std::uint64_t epoch = 0; epoch < 30'000; ++epoch) {
        const row_list rows = epoch_of(sampler, epoch);
        const auto position_of = [&](std::uint64_t row) {
            return static_cast<std::uint64_t>(std::ranges::find(rows, row) - rows.begin());
        };
        const std::uint64_t one = position_of(20);
        const std::uint64_t other = position_of(21);
        if (one / 32 != other / 32) continue;
        ++together;
        ++distances[(one + 32 - other) % 32 - 1];
    }
    CHECK(deviations(distances, static_cast<double>(together) / 31) < 5);
    // the two rows are in one chunk in half of the epochs; in the others, their chunks share a window with
    // probability 15/63
    const std::vector<double> expected{30'000 * (0.5 + 0.5 * 15 / 63), 30'000 * (0.5 - 0.5 * 15 / 63)};
    CHECK(deviations(row_list{together, 30'000 - together}, expected) < 5);
}

TEST_CASE("windowed: the first rows of a window do not predict the next window") {
    // Two windows of 16 chunks of 32 rows. Takes the first row of each window, and counts the distances of
    // their positions within their chunks.
    const auto sampler = sampler::windowed(1024, 23, 512);
    row_list distances(32);
    for (std::uint64_t epoch = 0; epoch < distances.size() * 500; ++epoch) {
        ++distances[(row_at(sampler, epoch, 0) + 1024 - row_at(sampler, epoch, 512)) % 32];
    }
    CHECK(deviations(distances, 500) < 5);
}

TEST_CASE("windowed: a window of all rows, or chunks of single rows, give one plain shuffle") {
    // the distance in the epoch of rows that are neighbours in the data
    constexpr std::uint64_t row_count = 100;
    constexpr std::uint64_t trials = 99 * 100;
    for (const std::uint64_t window_rows :
         {std::uint64_t{100}, std::uint64_t{1} << 63, std::uint64_t{20}, std::uint64_t{1}}) {
        CAPTURE(window_rows);
        const auto sampler = sampler::windowed(row_count, 8, window_rows);
        row_list distances(row_count - 1);
        for (std::uint64_t epoch = 0; epoch < trials; ++epoch) {
            const row_list rows = epoch_of(sampler, epoch);
            const auto position = [&](std::uint64_t row) {
                return static_cast<std::uint64_t>(std::ranges::find(rows, row) - rows.begin());
            };
            ++distances[(position(48) + row_count - position(49)) % row_count - 1];
        }
        CHECK(deviations(distances, trials / 99.0) < 5);
    }
    CHECK(epoch_of(sampler::windowed(row_count, 8, row_count), 3) ==
          epoch_of(sampler::windowed(row_count, 8, row_count + 1000), 3));
}

TEST_CASE("windowed: keeps its promises at 2^40 rows and more") {
    std::mt19937_64 random(9);
    for (const std::uint64_t row_count : {(std::uint64_t{1} << 40) + 12'345, permutation::max_size}) {
        constexpr std::uint64_t window_rows = 100'000;
        constexpr std::uint64_t chunk_rows = window_rows / 16;
        const auto sampler = sampler::windowed(row_count, 5, window_rows);
        for (unsigned i = 0; i < 10; ++i) {
            const std::uint64_t position =
                i == 0 ? row_count - 3 * window_rows / 4 : random() % (row_count - window_rows);
            CAPTURE(position);
            row_list rows(3 * window_rows / 4);
            sampler.rows_at(2, position, rows);
            CHECK(rows[1234] == row_at(sampler, 2, position + 1234));
            const row_list sorted = [&] {
                row_list result = rows;
                std::ranges::sort(result);
                return result;
            }();
            CHECK(sorted.back() < row_count);
            CHECK(std::ranges::adjacent_find(sorted) == sorted.end());
            // The rows are from at most two windows of 16 chunks. One chunk may be in two places: at the end
            // of the data and at its beginning.
            std::uint64_t places = 1;
            for (std::uint64_t k = 1; k < sorted.size(); ++k) {
                places += sorted[k] - sorted[k - 1] > chunk_rows ? 1U : 0U;
            }
            CHECK(places >= 12);
            CHECK(places <= 33);
        }
    }
    CHECK_THROWS_AS(sampler::windowed(permutation::max_size + 1, 0, 100), invalid_argument);
    CHECK_THROWS_WITH(sampler::windowed(10, 0, 0), doctest::Contains("windows of 0 rows"));
}

TEST_CASE("windowed: version 1 gives these rows for ever") {
    row_list rows(6);
    sampler::windowed(1797, 0, 256).rows_at(0, 0, rows);
    CHECK(rows == row_list{1428, 1568, 163, 1135, 400, 1600});
    sampler::windowed(1797, 12345, 256).rows_at(3, 1000, rows);
    CHECK(rows == row_list{979, 114, 1786, 1734, 183, 327});
    sampler::windowed(1797, 12345, 2000).rows_at(3, 1000, rows);
    CHECK(rows == row_list{18, 532, 519, 1599, 315, 795});
    sampler::windowed(1'000'000'000, 7, 65536).rows_at(1, 999'999'990, rows);
    CHECK(rows == row_list{957604783, 791204999, 865553881, 346385200, 592817066, 298094816});
}
