#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"
#include "sanitized.hpp"

// Shards and resuming, through whole loaders; schedule_test checks many more sizes without them.
using namespace pinflow;

namespace {

using place = std::pair<std::uint64_t, std::uint64_t>;

/// What a batch was, and where to continue after it.
struct delivery {
    std::uint64_t epoch = 0;
    std::uint64_t index = 0;
    std::vector<std::uint64_t> rows;
    place next;

    friend bool operator==(const delivery&, const delivery&) = default;
};

/// The rows of each epoch, whoever delivered them.
using row_lists = std::map<std::uint64_t, std::vector<std::uint64_t>>;

void add(row_lists& lists, const delivery& batch) {
    auto& rows = lists[batch.epoch];
    rows.insert(rows.end(), batch.rows.begin(), batch.rows.end());
}

row_lists sorted(row_lists lists) {
    for (auto& [epoch, rows] : lists)
        std::ranges::sort(rows);
    return lists;
}

/// Backwards in odd epochs.
class back_and_forth final : public row_sequence {
 public:
    explicit back_and_forth(std::uint64_t row_count) : row_count_(row_count) {}
    std::string name() const override { return "back-and-forth/1"; }
    std::uint64_t position_count() const override { return row_count_; }
    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const override {
        for (std::uint64_t& row : rows) {
            row = epoch % 2 == 0 ? first : row_count_ - 1 - first;
            ++first;
        }
    }

 private:
    std::uint64_t row_count_;
};

constexpr std::array every_order{order::sequential, order::shuffled, order::windowed,
                                 order::listed,     order::weighted, order::custom};

/// A sampler of this order, with parameters that are drawn.
sampler draw_sampler(order order, std::uint64_t row_count, std::mt19937_64& random) {
    switch (order) {
        case order::sequential:
            return sampler::sequential(row_count);
        case order::shuffled:
            return sampler::shuffled(row_count, random());
        case order::windowed:
            return sampler::windowed(row_count, random(), 1 + random() % (2 * row_count));
        case order::listed: {
            std::vector<std::uint64_t> rows(random() % (2 * row_count));
            std::ranges::generate(rows, [&] { return random() % row_count; });
            return sampler::listed(row_count, std::move(rows));
        }
        case order::weighted: {
            std::vector<double> weights(row_count);
            std::ranges::generate(weights, [&] { return static_cast<double>(1 + random() % 10); });
            return sampler::weighted(weights, random() % (2 * row_count), random());
        }
        case order::custom:
            break;
    }
    return sampler::custom(row_count, std::make_shared<back_and_forth>(row_count));
}

/// The rows of all epochs, as the order gives them.
row_lists all_of(const sampler& sampler, std::uint64_t epochs) {
    row_lists lists;
    for (std::uint64_t epoch = 0; epoch < epochs; ++epoch) {
        if (sampler.position_count() == 0) continue;
        lists[epoch].resize(sampler.position_count());
        sampler.rows_at(epoch, 0, lists[epoch]);
    }
    return lists;
}

struct run {
    std::vector<delivery> batches;
    std::vector<loader_state> states;  ///< of each batch
};

run deliver(const array& rows, const loader_options& options) {
    loader loader({rows}, options);
    const stream stream(options.device);
    run run;
    std::uint64_t delivered = 0;
    while (const auto batch = loader.next(stream)) {
        CHECK(holds_its_rows(*batch, stream));
        run.states.push_back(batch->state());
        run.batches.push_back({batch->epoch(),
                               batch->index(),
                               {batch->row_ids().begin(), batch->row_ids().end()},
                               {run.states.back().epoch, run.states.back().position}});
        delivered += batch->row_count();
    }
    CHECK(run.batches.size() == loader.batch_total());
    CHECK(delivered == loader.row_total());
    return run;
}

std::vector<run> deliver_by_all(const array& rows, loader_options options) {
    std::vector<run> runs;
    for (options.shard.rank = 0; options.shard.rank < options.shard.world; ++options.shard.rank)
        runs.push_back(deliver(rows, options));
    return runs;
}

/// Draws what does not depend on the order: batch size, shards, slots, threads and route.
void draw_sizes(loader_options& options, std::mt19937_64& random) {
    options.batch_rows = 1 + random() % 40;
    options.shard.world = 1 + static_cast<unsigned>(random() % 4);
    options.slots = 2 + static_cast<unsigned>(random() % 3);
    options.threads = 1 + static_cast<unsigned>(random() % 3);
    options.route = random() % 2 == 0 ? route::automatic : route::staged;
}

constexpr int draws_of_each_order = sanitized ? 4 : 10;

/// Calls `body(rows, options, random)` with options that are drawn, for each order on each device.
template <typename Body>
void for_draws(std::uint64_t seed, Body body) {
    on_each_device([&](const device& device) {
        for (const order order : every_order) {
            for (int i = 0; i < draws_of_each_order; ++i) {
                std::mt19937_64 random(seed * 1'000'003 + static_cast<unsigned>(order) * 101 +
                                       static_cast<unsigned>(i));
                const std::uint64_t row_count = 1 + random() % 250;
                loader_options options{.device = device, .epochs = 1 + random() % 3};
                options.sampler = draw_sampler(order, row_count, random);
                draw_sizes(options, random);
                INFO(to_string(options.sampler->identity())
                     << ", " << row_count << " rows, batches of " << options.batch_rows << ", "
                     << options.shard.world << " ranks, " << options.epochs << " epochs, number " << i);
                body(numbered_rows(row_count), options, random);
            }
        }
    });
}

}  // namespace

TEST_CASE("resume: the ranks deliver every position of every epoch once, together") {
    for_draws(1, [](const array& rows, const loader_options& options, std::mt19937_64& /*random*/) {
        row_lists delivered;
        for (const run& run : deliver_by_all(rows, options)) {
            for (const delivery& batch : run.batches)
                add(delivered, batch);
        }
        CHECK(sorted(delivered) == sorted(all_of(*options.sampler, options.epochs)));
    });
}

TEST_CASE(
    "resume: after any interruption, the rows that were left come, for any number of ranks and batch size") {
    for_draws(2, [](const array& rows, loader_options options, std::mt19937_64& random) {
        const std::vector<run> runs = deliver_by_all(rows, options);
        const run& stopped = runs[random() % runs.size()];
        if (stopped.batches.empty()) return;
        const std::size_t last = random() % stopped.batches.size();
        row_lists delivered;
        for (const run& run : runs) {
            for (std::size_t i = 0; i < run.batches.size(); ++i) {
                if (run.batches[i].next > stopped.batches[last].next) break;
                add(delivered, run.batches[i]);
                // all ranks have the same state after the same step
                if (run.batches[i].next == stopped.batches[last].next)
                    CHECK(run.states[i].to_json() == stopped.states[last].to_json());
            }
        }
        options.resume_from = loader_state::from_json(stopped.states[last].to_json());
        draw_sizes(options, random);
        for (const run& run : deliver_by_all(rows, options)) {
            for (const delivery& batch : run.batches)
                add(delivered, batch);
        }
        CHECK(sorted(delivered) == sorted(all_of(*options.sampler, options.epochs)));
    });
}

TEST_CASE("resume: after any interruption, the same batches come at the same sizes, however often") {
    for_draws(3, [](const array& rows, loader_options options, std::mt19937_64& random) {
        if (random() % 3 == 0) options.tail = tail::drop;
        options.shard.rank = static_cast<unsigned>(random() % options.shard.world);
        const std::vector<delivery> whole = deliver(rows, options).batches;
        std::vector<delivery> pieces;
        for (int interruptions = 0; interruptions < 3; ++interruptions) {
            loader loader({rows}, options);
            for (std::uint64_t left = random() % (whole.size() + 1); left > 0; --left) {
                const auto batch = loader.next();
                if (!batch) break;
                const loader_state state = batch->state();
                pieces.push_back({batch->epoch(),
                                  batch->index(),
                                  {batch->row_ids().begin(), batch->row_ids().end()},
                                  {state.epoch, state.position}});
            }
            // batches that are ready but were not taken do not count as delivered
            options.resume_from = loader_state::from_json(loader.state().to_json());
        }
        std::ranges::move(deliver(rows, options).batches, std::back_inserter(pieces));
        CHECK(pieces == whole);
    });
}

TEST_CASE("resume: a dropped tail delivers no position twice, and no batch that is not full") {
    for_draws(4, [](const array& rows, loader_options options, std::mt19937_64& /*random*/) {
        options.tail = tail::drop;
        std::uint64_t batches_of_first = 0;
        row_lists delivered;
        for (const run& run : deliver_by_all(rows, options)) {
            if (batches_of_first == 0) batches_of_first = run.batches.size();
            CHECK(run.batches.size() == batches_of_first);
            for (const delivery& batch : run.batches) {
                CHECK(batch.rows.size() == options.batch_rows);
                add(delivered, batch);
            }
        }
        const row_lists all = sorted(all_of(*options.sampler, options.epochs));
        for (auto& [epoch, list] : sorted(delivered))
            CHECK(std::ranges::includes(all.at(epoch), list));
    });
}

TEST_CASE("resume: a seed gives one order, on every device, staged or not, and for any number of threads") {
    constexpr std::uint64_t row_count = 500;
    const array rows = numbered_rows(row_count);
    for (const order order : every_order) {
        CAPTURE(to_string(order));
        std::mt19937_64 random(static_cast<unsigned>(order));
        const sampler sampler = draw_sampler(order, row_count, random);
        const row_lists expected = all_of(sampler, 2);
        if (order != order::sequential && order != order::listed) CHECK(expected.at(0) != expected.at(1));
        on_each_device([&](const device& device) {
            for (const unsigned threads : {1U, 2U, 7U}) {
                for (const route route : {route::automatic, route::staged}) {
                    row_lists delivered;
                    for (const delivery& batch : deliver(rows, {.device = device,
                                                                .batch_rows = 64,
                                                                .sampler = sampler,
                                                                .epochs = 2,
                                                                .route = route,
                                                                .threads = threads})
                                                     .batches) {
                        add(delivered, batch);
                    }
                    CHECK(delivered == expected);  // not sorted
                }
            }
        });
    }
}

TEST_CASE("resume: options give the same orders as samplers, with a window that depends only on the data") {
    const array rows = numbered_rows(500);
    const auto delivered_by = [&](const loader_options& options) {
        row_lists delivered;
        for (const delivery& batch : deliver(rows, options).batches)
            add(delivered, batch);
        return delivered;
    };
    const device host = device::host();
    CHECK(delivered_by({.device = host, .order = order::shuffled, .seed = 3}) ==
          all_of(sampler::shuffled(500, 3), 1));
    CHECK(delivered_by({.device = host, .order = order::windowed, .seed = 3, .window_rows = 64}) ==
          all_of(sampler::windowed(500, 3, 64), 1));
    const loader_options windowed{.device = host, .order = order::windowed, .seed = 3};
    CHECK(delivered_by(windowed) == all_of(sampler::windowed(500, 3, default_window_rows(32)), 1));
    // rows of 64 KiB and of 32 bytes: a window of some 1000 samples
    const array large = array_of<std::uint8_t>(std::vector<std::uint8_t>(500 << 16), {500, 1 << 16});
    loader both({large, rows}, windowed);
    CHECK(both.state().order == sampler::windowed(500, 3, default_window_rows((1 << 16) + 32)).identity());
}

TEST_CASE("resume: a loader refuses contradictory orders and shards, and gives the reason") {
    const auto refusal = [](loader_options options) -> std::string {
        options.device = device::host();
        try {
            const loader loader({numbered_rows(10)}, options);
        } catch (const invalid_argument& failure) {
            return failure.what();
        }
        return "it was not refused";
    };
    const auto says = [](const std::string& sentence, const char* part) {
        return sentence.find(part) != std::string::npos;
    };
    const sampler fitting = sampler::shuffled(10, 1);
    CHECK(refusal({.sampler = fitting}) == "it was not refused");
    CHECK(says(refusal({.sampler = sampler::shuffled(11, 1)}), "a sampler of 11 rows"));
    CHECK(says(refusal({.order = order::shuffled, .sampler = fitting}), "these belong to the sampler"));
    CHECK(says(refusal({.seed = 1, .sampler = fitting}), "these belong to the sampler"));
    CHECK(says(refusal({.window_rows = 1, .sampler = fitting}), "these belong to the sampler"));
    CHECK(says(refusal({.order = order::shuffled, .window_rows = 5}), "only the windowed order"));
    CHECK(says(refusal({.order = order::weighted}), "the order weighted needs"));
    CHECK(says(refusal({.shard = {2, 2}}), "no rank 2 among 2"));
    // the rows of another order are not contiguous
    CHECK_THROWS_AS(
        loader({numbered_rows(10)}, {.device = device::host(), .sampler = fitting, .route = route::direct}),
        unsupported);
}

TEST_CASE("resume: at the end of all epochs nothing comes, and more epochs continue from there") {
    const array rows = numbered_rows(25);
    loader_options options{.device = device::host(), .batch_rows = 10, .order = order::shuffled, .epochs = 2};
    options.resume_from = deliver(rows, options).states.back();
    CHECK(options.resume_from->epoch == 2);
    CHECK(deliver(rows, options).batches.empty());
    options.epochs = 1;
    CHECK(deliver(rows, options).batches.empty());
    options.epochs = 3;
    const auto more = deliver(rows, options).batches;
    REQUIRE(more.size() == 3);
    CHECK(more[0].epoch == 2);
    CHECK(more[0].index == 0);
}

TEST_CASE("resume: first_epoch may be any epoch, and the rows from there on are those of a whole run") {
    const array rows = numbered_rows(100);
    on_each_device([&](const device& device) {
        loader_options options{.device = device, .batch_rows = 30, .order = order::shuffled, .epochs = 4};
        const stream stream(device);
        std::vector<std::uint64_t> expected;
        loader whole({rows}, options);
        while (const auto batch = whole.next(stream)) {
            if (batch->epoch() >= 2)
                expected.insert(expected.end(), batch->row_ids().begin(), batch->row_ids().end());
        }
        options.first_epoch = 2;
        std::vector<std::uint64_t> seen;
        loader later({rows}, options);
        CHECK(later.state().epoch == 2);
        CHECK(later.batch_total() == 8);
        while (const auto batch = later.next(stream)) {
            CHECK(batch->epoch() >= 2);
            seen.insert(seen.end(), batch->row_ids().begin(), batch->row_ids().end());
        }
        CHECK(seen == expected);
        options.first_epoch = 4;
        CHECK_FALSE(loader({rows}, options).next(stream).has_value());
        options.resume_from = whole.state();
        CHECK_THROWS_AS(loader({rows}, options), invalid_argument);
    });
}

TEST_CASE("wait_for: waits for a limited time, and its waits count in the report") {
    using namespace std::chrono_literals;
    auto source = std::make_shared<scripted_rows>(20);
    const gate gate;
    source->before_read = [&](std::uint64_t) { gate.wait(); };
    on_each_device([&](const device& device) {
        const stream stream(device);
        loader loader({source}, {.device = device, .batch_rows = 10, .slots = 2});
        if (device.kind() == device_kind::host) {  // the gate is shut
            CHECK_FALSE(loader.wait_for(20ms));
            CHECK_FALSE(loader.wait_for(-1ns));
            gate.open();
        }
        CHECK(loader.wait_for(std::chrono::nanoseconds::max()));
        CHECK(loader.wait_for(0ns));
        for (unsigned batches = 0; batches < 2; ++batches) {
            REQUIRE(loader.wait_for(1h));
            const auto batch = loader.next(stream);
            REQUIRE(batch);
            CHECK(holds_its_rows(*batch, stream));
        }
        CHECK(loader.wait_for(1h));  // for the end
        CHECK_FALSE(loader.next(stream).has_value());
        CHECK(loader.wait_for(0ns));
        const loader_report report = loader.report();
        CHECK(report.batches == 2);
        if (device.kind() == device_kind::host)
            CHECK(report.storage_wait + report.file_wait + report.cpu_wait + report.link_wait >= 20ms);
    });
}

TEST_CASE(
    "resume: a stopped loader ends, also for a thread that waits in next, and leased batches stay valid") {
    auto source = std::make_shared<scripted_rows>(100);
    const gate gate;
    source->before_read = [&](std::uint64_t first) {
        if (first >= 50) gate.wait();
    };
    on_each_device([&](const device& device) {
        const stream stream(device);
        loader loader({source}, {.device = device, .batch_rows = 10, .slots = 2});
        const auto leased = loader.next(stream);
        REQUIRE(leased);
        CHECK(holds_its_rows(*leased, stream));
        std::thread waiting([&] {
            while (loader.next()) {
            }
        });
        loader.stop();
        gate.open();
        waiting.join();
        CHECK_FALSE(loader.next(stream).has_value());
        CHECK(holds_its_rows(*leased, stream));
    });
}
