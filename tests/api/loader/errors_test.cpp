#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"
#include "sanitized.hpp"

// Errors of a loader's sources, and loaders that end early.
using namespace pinflow;

namespace {

constexpr std::uint64_t total_rows = 200;
constexpr std::uint64_t batch_rows = 10;

/// Thrown by tests; no type of pinflow's.
struct own_error : std::runtime_error {
    using runtime_error::runtime_error;
};

/// Numbered rows, one of which cannot be read.
class broken_rows final : public row_source {
 public:
    explicit broken_rows(std::uint64_t broken_row) : broken_row_(broken_row), rows_(total_rows) {}

    const pinflow::dtype& dtype() const noexcept override { return rows_.dtype(); }
    const shape_vector& row_shape() const noexcept override { return rows_.row_shape(); }
    std::uint64_t row_count() const noexcept override { return rows_.row_count(); }
    std::uint64_t row_size_bytes() const noexcept override { return rows_.row_size_bytes(); }
    std::string description() const override { return "rows of which one is broken"; }
    std::span<const row_extent> extents() const noexcept override { return {}; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override {
        if (std::ranges::find(ids, broken_row_) != ids.end()) throw own_error("this row is broken");
        return rows_.read_rows(ids, destination);
    }
    void check_unchanged() const override {}

 private:
    std::uint64_t broken_row_;
    scripted_rows rows_;
};

/// 0, 1, 2, ... with an error at one position.
class broken_order final : public row_sequence {
 public:
    explicit broken_order(std::uint64_t broken_position) : broken_position_(broken_position) {}
    std::string name() const override { return "broken/1"; }
    std::uint64_t position_count() const override { return total_rows; }
    void rows_at(std::uint64_t /*epoch*/, std::uint64_t first, std::span<std::uint64_t> rows) const override {
        if (first <= broken_position_ && broken_position_ - first < rows.size())
            throw own_error("this position is broken");
        for (std::uint64_t& row : rows)
            row = first++;
    }

 private:
    std::uint64_t broken_position_;
};

/// Checks that a loader gives so many batches, all of them right, then throws own_error once, then ends.
void check_breaks_after(std::uint64_t batches, std::vector<std::shared_ptr<const row_source>> sources,
                        const loader_options& options) {
    loader loader(std::move(sources), options);
    const stream stream(options.device);
    for (std::uint64_t index = 0; index < batches; ++index) {
        const auto batch = loader.next(stream);
        REQUIRE(batch);
        CHECK(batch->index() == index);
        CHECK(holds_its_rows(*batch, stream));
    }
    CHECK_THROWS_AS(static_cast<void>(loader.next(stream)), own_error);
    CHECK_FALSE(loader.next(stream).has_value());
    CHECK_FALSE(loader.next().has_value());
    CHECK(loader.report().batches == batches);
}

/// Calls `body(options)` for the routes of custom row sources, with one thread and with four.
template <typename Body>
void for_routes_of_own_rows(Body body) {
    on_each_device([&](const device& device) {
        for (const route route : {route::automatic, route::staged}) {
            for (const unsigned threads : {1U, 4U}) {
                INFO("route " << to_string(route) << ", " << threads << " threads");
                body(loader_options{.device = device,
                                    .batch_rows = batch_rows,
                                    .route = route,
                                    .slots = 4,
                                    .threads = threads});
            }
        }
    });
}

}  // namespace

TEST_CASE("errors: a source's exception comes once, as it is, after the batches before it") {
    for_routes_of_own_rows([](const loader_options& options) {
        for (const std::uint64_t broken_row : {0U, 7U, 73U, 199U}) {
            CAPTURE(broken_row);
            check_breaks_after(broken_row / batch_rows, {std::make_shared<broken_rows>(broken_row)}, options);
            check_breaks_after(broken_row / batch_rows,
                               {numbered_rows(total_rows), std::make_shared<broken_rows>(broken_row)},
                               options);
        }
    });
}

TEST_CASE("errors: an exception of a user's order comes once, as it is, after the batches before it") {
    for_routes_of_own_rows([](loader_options options) {
        for (const std::uint64_t broken_position : {0U, 7U, 73U, 199U}) {
            CAPTURE(broken_position);
            options.sampler = sampler::custom(total_rows, std::make_shared<broken_order>(broken_position));
            check_breaks_after(broken_position / batch_rows, {numbered_rows(total_rows)}, options);
        }
    });
}

TEST_CASE("errors: a user's order that gives a row past the end is reported, and no such row is read") {
    class too_far final : public row_sequence {
     public:
        std::string name() const override { return "too-far/1"; }
        std::uint64_t position_count() const override { return total_rows; }
        void rows_at(std::uint64_t, std::uint64_t first, std::span<std::uint64_t> rows) const override {
            for (std::uint64_t& row : rows)
                row = first++ == 150 ? total_rows : 0;
        }
    };
    on_each_device([](const device& device) {
        loader loader({numbered_rows(total_rows)},
                      {.device = device,
                       .batch_rows = batch_rows,
                       .sampler = sampler::custom(total_rows, std::make_shared<too_far>())});
        const stream stream(device);
        std::uint64_t batches = 0;
        CHECK_THROWS_AS(
            [&] {
                while (const auto batch = loader.next(stream)) {
                    CHECK(holds_its_rows(*batch, stream));
                    ++batches;
                }
            }(),
            invalid_argument);
        CHECK(batches == 150 / batch_rows);
        CHECK_FALSE(loader.next(stream).has_value());
    });
}

TEST_CASE("errors: a source without files that throws data_changed ends the loader") {
    for_routes_of_own_rows([](const loader_options& options) {
        const auto source = std::make_shared<scripted_rows>(total_rows);
        std::atomic<bool> changed = false;
        source->on_check = [&] {
            if (changed) throw data_changed("changed by the test");
        };
        loader loader({source}, options);
        REQUIRE(loader.next());
        changed = true;
        CHECK_THROWS_AS(
            [&] {
                while (loader.next()) {
                }
            }(),
            data_changed);
        CHECK_FALSE(loader.next().has_value());
    });
}

TEST_CASE("errors: leased batches stay intact after an error") {
    for_routes_of_own_rows([](const loader_options& options) {
        const stream stream(options.device);
        std::vector<batch> leased;
        {
            loader loader({std::make_shared<broken_rows>(35)}, options);
            for (int i = 0; i < 3; ++i) {
                auto batch = loader.next(stream);
                REQUIRE(batch);
                leased.push_back(std::move(*batch));
            }
            CHECK_THROWS_AS(static_cast<void>(loader.next(stream)), own_error);
        }
        for (const batch& batch : leased)
            CHECK(holds_its_rows(batch, stream));
    });
}

TEST_CASE("errors: an error that is never fetched does not block the loader's destructor") {
    for_routes_of_own_rows([](const loader_options& options) {
        for (const std::uint64_t broken_row : {0U, 15U, 95U})
            const loader never_asked({std::make_shared<broken_rows>(broken_row)}, options);
    });
}

TEST_CASE("errors: a loader may end at any moment, and batches that were taken outlive it") {
    const array small = numbered_rows(500, 64);
    // rows of 64 KiB, which a GPU can take from registered pages
    const array large = numbered_rows(500, 8192);
    on_each_device([&](const device& device) {
        std::mt19937_64 random(50);
        const stream stream(device);
        const int loader_count = sanitized || device.kind() != device_kind::host ? 60 : 300;
        for (int i = 0; i < loader_count; ++i) {
            CAPTURE(i);
            std::vector<batch> leased;
            {
                loader loader({random() % 4 == 0 ? large : small},
                              {.device = device,
                               .batch_rows = 10,
                               .order = random() % 2 == 0 ? order::sequential : order::shuffled,
                               .route = random() % 2 == 0 ? route::automatic : route::staged,
                               .slots = 2 + static_cast<unsigned>(random() % 4),
                               .threads = 1 + static_cast<unsigned>(random() % 4),
                               .pin_budget_bytes = generous_pin_budget});
                for (std::uint64_t taken = random() % 12; taken > 0; --taken) {
                    auto batch = random() % 3 == 0 ? loader.next() : loader.next(stream);
                    REQUIRE(batch);
                    if (leased.empty() && random() % 3 == 0) leased.push_back(std::move(*batch));
                }
            }
            for (const batch& batch : leased)
                CHECK(holds_its_rows(batch, stream));
        }
    });
}

TEST_CASE("errors: a loader that was moved continues") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const loader_options options{.device = device, .batch_rows = batch_rows};
        loader first({numbered_rows(total_rows)}, options);
        REQUIRE(first.next(stream));
        loader second(std::move(first));
        auto batch = second.next(stream);
        REQUIRE(batch);
        CHECK(batch->index() == 1);
        second = loader({numbered_rows(30)}, options);
        CHECK(holds_its_rows(*batch, stream));
        std::uint64_t rows = 0;
        while (const auto next = second.next(stream))
            rows += next->row_count();
        CHECK(rows == 30);
    });
}
