#include "pinflow/loader/sampler.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_lists.hpp"

using namespace pinflow;

namespace {

/// Epoch e begins with row e modulo the row count, and counts backwards.
class countdown : public row_sequence {
 public:
    explicit countdown(std::uint64_t row_count, std::string name = "countdown/3")
        : row_count_(row_count), name_(std::move(name)) {}

    std::string name() const override { return name_; }
    std::uint64_t position_count() const override { return 2 * row_count_; }
    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const override {
        for (std::uint64_t& row : rows) {
            row = (epoch + 2 * row_count_ - first++) % row_count_;
        }
    }

 private:
    std::uint64_t row_count_;
    std::string name_;
};

/// One sampler of each order, of 1000 rows.
std::vector<sampler> every_order() {
    row_list list(700);
    std::ranges::generate(list, [random = std::mt19937_64(5)]() mutable { return random() % 1000; });
    std::vector<double> weights(1000);
    std::iota(weights.begin(), weights.end(), 0.0);
    return {sampler::sequential(1000),           sampler::shuffled(1000, 3),
            sampler::windowed(1000, 3, 100),     sampler::listed(1000, list),
            sampler::weighted(weights, 1500, 3), sampler::custom(1000, std::make_shared<countdown>(1000))};
}

std::string refused_name(const std::string& name) {
    try {
        static_cast<void>(sampler::custom(10, std::make_shared<countdown>(10, name)));
    } catch (const invalid_argument& refused) {
        return refused.what();
    }
    return {};
}

}  // namespace

TEST_CASE("sampler: sequential is the order of the file, in every epoch") {
    const auto sampler = sampler::sequential(10);
    row_list expected(10);
    std::iota(expected.begin(), expected.end(), 0);
    CHECK(epoch_of(sampler, 0) == expected);
    CHECK(epoch_of(sampler, 5) == expected);
}

TEST_CASE("sampler: shuffled takes every row once, differently in every epoch and for every seed") {
    const auto first = sampler::shuffled(1000, 1);
    const auto second = sampler::shuffled(1000, 2);
    std::vector<row_list> orders{epoch_of(first, 0), epoch_of(first, 1), epoch_of(second, 0),
                                 epoch_of(second, 1)};
    row_list all(1000);
    std::iota(all.begin(), all.end(), 0);
    for (std::size_t i = 0; i < orders.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            CHECK(orders[i] != orders[j]);
        }
        row_list sorted = orders[i];
        std::ranges::sort(sorted);
        CHECK(sorted == all);
    }
    CHECK(epoch_of(first, 0) == orders[0]);
}

TEST_CASE("sampler: listed gives the list in every epoch, including repeated and missing rows") {
    const row_list list{7, 0, 7, 7, 3};
    const auto sampler = sampler::listed(8, list);
    CHECK(sampler.row_count() == 8);
    CHECK(sampler.position_count() == 5);
    CHECK(epoch_of(sampler, 0) == list);
    CHECK(epoch_of(sampler, 9) == list);
    row_list part(2);
    sampler.rows_at(1, 3, part);
    CHECK(part == row_list{7, 3});
    CHECK(epoch_of(sampler::listed(8, {}), 0).empty());
    CHECK(contains_all(message_of<invalid_argument>([&] { sampler::listed(7, list); }),
                       {"the list of rows", "row 7 at position 0,", "the data has 7 rows"}));
    CHECK(contains_all(message_of<invalid_argument>([] { sampler::listed(0, {1}); }),
                       {"the list of rows", "row 1 at position 0,", "the data has 0 rows"}));
}

TEST_CASE("sampler: a custom order is used unchanged") {
    const auto sampler = sampler::custom(4, std::make_shared<countdown>(4));
    CHECK(sampler.position_count() == 8);
    CHECK(epoch_of(sampler, 0) == row_list{0, 3, 2, 1, 0, 3, 2, 1});
    CHECK(epoch_of(sampler, 1) == row_list{1, 0, 3, 2, 1, 0, 3, 2});
    CHECK(sampler.identity().name == "countdown/3");
}

TEST_CASE("sampler: a row past the end in a custom order is an error that names the row") {
    // of 5 rows, for data that have 4
    const auto sampler = sampler::custom(4, std::make_shared<countdown>(5));
    row_list rows(4);
    CHECK_NOTHROW(sampler.rows_at(0, 2, rows));
    CHECK(contains_all(message_of<invalid_argument>([&] { sampler.rows_at(3, 3, rows); }),
                       {"order 'countdown/3'", "row 4 at position 4 of epoch 3,", "the data has 4 rows"}));

    class failing : public countdown {
     public:
        failing() : countdown(5) {}
        void rows_at(std::uint64_t, std::uint64_t, std::span<std::uint64_t>) const override {
            throw std::runtime_error("the curriculum is lost");
        }
    };
    CHECK_THROWS_WITH(sampler::custom(4, std::make_shared<failing>()).rows_at(0, 0, rows),
                      "the curriculum is lost");
    CHECK_THROWS_AS(sampler::custom(4, nullptr), invalid_argument);
}

TEST_CASE("sampler: a custom order needs a name with a version, and not one of pinflow's") {
    for (const char* good : {"curriculum/1", "a/0", "Hard-first_2.b/20261121"}) {
        CHECK(refused_name(good) == "");
    }
    for (const char* bad : {"", "/", "/1", "curriculum", "curriculum/", "curriculum/one", "a/1/2",
                            "two words/1", "a\n/1", "a/1 ", "\xff/1"}) {
        CAPTURE(bad);
        CHECK(refused_name(bad).find("then a slash and a version of digits") != std::string::npos);
    }
    for (const char* taken : {"shuffled/1", "sequential/2", "windowed/7", "custom/1"}) {
        CHECK(contains_all(refused_name(taken),
                           {"cannot be named '" + std::string(taken) + "'", "pinflow uses the name"}));
    }
}

TEST_CASE("sampler: a row at a position does not depend on how the positions are asked for") {
    for (const sampler& sampler : every_order()) {
        CAPTURE(to_string(sampler.order()));
        const row_list whole = epoch_of(sampler, 4);
        for (const std::size_t piece : {1U, 10U, 64U, 699U}) {
            row_list rows;
            while (rows.size() < whole.size()) {
                row_list part(std::min(piece, whole.size() - rows.size()));
                sampler.rows_at(4, rows.size(), part);
                rows.insert(rows.end(), part.begin(), part.end());
            }
            CHECK(rows == whole);
        }
    }
}

TEST_CASE("sampler: any number of threads see the same order") {
    for (const sampler& sampler : every_order()) {
        CAPTURE(to_string(sampler.order()));
        const row_list whole = epoch_of(sampler, 2);
        for (const std::uint64_t thread_count : {2U, 3U, 8U}) {
            row_list rows(whole.size());
            {
                std::vector<std::jthread> threads;
                for (std::uint64_t t = 0; t < thread_count; ++t) {
                    threads.emplace_back([&, t, copy = sampler] {
                        // some ask the sampler that all share, some a copy
                        const pinflow::sampler& asked = t % 2 == 0 ? sampler : copy;
                        const std::uint64_t first = rows.size() * t / thread_count;
                        const std::uint64_t last = rows.size() * (t + 1) / thread_count;
                        asked.rows_at(2, first, std::span(rows).subspan(first, last - first));
                    });
                }
            }
            CHECK(rows == whole);
        }
    }
}

TEST_CASE("sampler: refuses positions past the end of an epoch") {
    for (const sampler& sampler : every_order()) {
        CAPTURE(to_string(sampler.order()));
        row_list rows(10);
        const std::uint64_t count = sampler.position_count();
        CHECK_NOTHROW(sampler.rows_at(0, count - 10, rows));
        CHECK_NOTHROW(sampler.rows_at(0, count, {}));
        CHECK_THROWS_AS(sampler.rows_at(0, count - 9, rows), invalid_argument);
        CHECK_THROWS_AS(sampler.rows_at(0, count + 1, {}), invalid_argument);
        CHECK_THROWS_AS(sampler.rows_at(0, ~std::uint64_t{0}, rows), invalid_argument);
    }
    CHECK(contains_all(message_of<invalid_argument>([] {
                           row_list rows(3);
                           sampler::sequential(10).rows_at(0, 8, rows);
                       }),
                       {"3 rows from position 8", "an epoch has 10"}));
}

TEST_CASE("sampler: accepts data without rows, and refuses more rows than can be shuffled") {
    for (const sampler& sampler :
         {sampler::sequential(0), sampler::shuffled(0, 1), sampler::windowed(0, 1, 10)}) {
        CHECK(sampler.position_count() == 0);
        CHECK_NOTHROW(sampler.rows_at(0, 0, {}));
    }
    CHECK_THROWS_AS(sampler::shuffled(permutation::max_size + 1, 0), invalid_argument);
}

TEST_CASE("sampler: an identity names all that the order depends on") {
    const std::vector<sampler> orders = every_order();
    const std::vector<std::string> expected{
        "sequential/1, seed 0, 1000 positions",
        "shuffled/1, seed 3, 1000 positions",
        "windowed/1, seed 3, windows of 100 rows, 1000 positions",
        "listed/1, seed 0, 700 positions, content 8055152e0179dc28",
        "weighted/1, seed 3, 1500 positions, content 0ae1713e25031f9e",
        "countdown/3, seed 0, 2000 positions",
    };
    for (std::size_t i = 0; i < orders.size(); ++i) {
        CHECK(to_string(orders[i].identity()) == expected[i]);
        for (std::size_t j = 0; j < orders.size(); ++j) {
            CHECK((orders[i].identity() == orders[j].identity()) == (i == j));
        }
        if (orders[i].order() != order::custom) {
            CHECK(orders[i].identity().name == std::string(to_string(orders[i].order())) + "/1");
        }
    }
    CHECK(sampler::shuffled(10, 1).identity() != sampler::shuffled(10, 2).identity());
    CHECK(sampler::windowed(100, 1, 50).identity() != sampler::windowed(100, 1, 51).identity());
    CHECK(sampler::listed(10, {1, 2}).identity() != sampler::listed(10, {2, 1}).identity());
    // windows larger than the data are one order
    CHECK(sampler::windowed(100, 1, 100).identity() == sampler::windowed(100, 1, 5000).identity());
}

TEST_CASE("sampler: the default window depends on the size of a row alone") {
    CHECK(default_window_rows(1) == std::uint64_t{64} << 20);
    CHECK(default_window_rows(784) == 85598);
    CHECK(default_window_rows(std::uint64_t{64} << 20) == 1);
    CHECK(default_window_rows(~std::uint64_t{0}) == 1);
    CHECK(default_window_rows(0) == std::uint64_t{64} << 20);
}

TEST_CASE("sampler: seed and epoch give these rows for ever") {
    row_list rows(4);
    sampler::shuffled(1797, 0).rows_at(0, 0, rows);
    CHECK(rows == row_list{1685, 620, 497, 592});
    sampler::shuffled(1797, 12345).rows_at(3, 100, rows);
    CHECK(rows == row_list{1171, 1410, 538, 1641});
    sampler::sequential(1797).rows_at(3, 100, rows);
    CHECK(rows == row_list{100, 101, 102, 103});
    sampler::listed(1797, {5, 1, 1796, 1, 0}).rows_at(3, 1, rows);
    CHECK(rows == row_list{1, 1796, 1, 0});
}
