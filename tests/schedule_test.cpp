#include "loader/schedule.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"

using namespace pinflow;
using detail::epoch_position;
using detail::rank_batch;
using detail::schedule;
using detail::schedule_terms;

namespace {

std::vector<rank_batch> batches_of(const schedule& schedule) {
    std::vector<rank_batch> batches;
    for (std::uint64_t number = 0; number < schedule.batch_count(); ++number)
        batches.push_back(schedule.at(number));
    return batches;
}

/// The batches of all ranks. `terms.shard.world` is the number of ranks.
std::vector<std::vector<rank_batch>> batches_of_ranks(schedule_terms terms) {
    std::vector<std::vector<rank_batch>> ranks;
    for (terms.shard.rank = 0; terms.shard.rank < terms.shard.world; ++terms.shard.rank)
        ranks.push_back(batches_of(schedule(terms)));
    return ranks;
}

/// How often each position of each epoch is taken.
using counts = std::map<std::pair<std::uint64_t, std::uint64_t>, unsigned>;

void add(counts& taken, const rank_batch& batch) {
    for (std::uint64_t i = 0; i < batch.row_count; ++i)
        ++taken[{batch.epoch, batch.position + i}];
}

counts taken_by(const std::vector<std::vector<rank_batch>>& ranks) {
    counts taken;
    for (const auto& rank : ranks) {
        for (const rank_batch& batch : rank)
            add(taken, batch);
    }
    return taken;
}

/// Every position from `start` on, once.
counts all_from(const epoch_position& start, std::uint64_t position_count, std::uint64_t epochs) {
    counts all;
    for (std::uint64_t epoch = start.epoch; epoch < epochs; ++epoch) {
        for (std::uint64_t at = epoch == start.epoch ? start.position : 0; at < position_count; ++at)
            all[{epoch, at}] = 1;
    }
    return all;
}

bool is_before(const epoch_position& a, const epoch_position& b) {
    return std::pair(a.epoch, a.position) < std::pair(b.epoch, b.position);
}

schedule_terms draw(std::mt19937_64& random) {
    const auto below = [&](std::uint64_t end) { return random() % end; };
    schedule_terms terms;
    terms.position_count = below(4) == 0 ? below(5) : below(120);
    terms.batch_rows = 1 + (below(4) == 0 ? below(200) : below(12));
    terms.shard.world = 1 + static_cast<unsigned>(below(below(2) == 0 ? 3 : 9));
    terms.epochs = 1 + below(3);
    if (terms.position_count > 0 && below(2) == 0)
        terms.start = {below(terms.epochs), below(terms.position_count)};
    return terms;
}

std::string spelled(const schedule_terms& terms) {
    return std::to_string(terms.position_count) + " positions, batches of " +
           std::to_string(terms.batch_rows) + ", " + std::to_string(terms.shard.world) + " ranks, from " +
           std::to_string(terms.start.epoch) + ":" + std::to_string(terms.start.position) + " of " +
           std::to_string(terms.epochs) + " epochs";
}

constexpr int draws = 1500;

}  // namespace

TEST_CASE("schedule: the ranks take every position once, in batches that are no larger than asked for") {
    std::mt19937_64 random(1);
    for (int i = 0; i < draws; ++i) {
        const schedule_terms terms = draw(random);
        INFO(spelled(terms));
        const auto ranks = batches_of_ranks(terms);
        CHECK(taken_by(ranks) == all_from(terms.start, terms.position_count, terms.epochs));
        for (const auto& rank : ranks) {
            CHECK(std::ranges::all_of(rank, [&](const rank_batch& batch) {
                return batch.row_count > 0 && batch.row_count <= terms.batch_rows;
            }));
        }
    }
}

TEST_CASE("schedule: a batch is [(sW+r)B, (sW+r+1)B) in step s, and [T*r/W, T*(r+1)/W) of the tail") {
    // 23 = 2 steps of 3 ranks with 3 each, and 5 that are split as 1, 2, 2
    const auto ranks =
        batches_of_ranks({.position_count = 23, .batch_rows = 3, .shard = {0, 3}, .epochs = 2});
    const std::array<std::vector<std::pair<std::uint64_t, std::uint64_t>>, 3> expected{
        {{{0, 3}, {9, 3}, {18, 1}}, {{3, 3}, {12, 3}, {19, 2}}, {{6, 3}, {15, 3}, {21, 2}}}};
    for (std::size_t rank = 0; rank < 3; ++rank) {
        REQUIRE(ranks[rank].size() == 6);
        for (std::size_t i = 0; i < 6; ++i) {
            const rank_batch& batch = ranks[rank][i];
            CHECK(std::pair(batch.position, batch.row_count) == expected[rank][i % 3]);
            CHECK(batch.epoch == i / 3);
            CHECK(batch.index == i % 3);
            CHECK(batch.last_of_epoch == (i % 3 == 2));
        }
        CHECK(ranks[rank][0].end == epoch_position{0, 9});
        CHECK(ranks[rank][1].end == epoch_position{0, 18});
        CHECK(ranks[rank][2].end == epoch_position{1, 0});
        CHECK(ranks[rank][5].end == epoch_position{2, 0});
    }
    // two positions for three ranks: the first one has no batch
    const auto few = batches_of_ranks({.position_count = 2, .batch_rows = 3, .shard = {0, 3}});
    CHECK(few[0].empty());
    CHECK(few[1].size() == 1);
    CHECK(few[2].size() == 1);
}

TEST_CASE("schedule: a dropped tail leaves full batches, the same number for each rank") {
    std::mt19937_64 random(2);
    for (int i = 0; i < draws; ++i) {
        schedule_terms terms = draw(random);
        terms.tail = tail::drop;
        INFO(spelled(terms));
        const std::uint64_t step_rows = terms.shard.world * terms.batch_rows;
        const std::uint64_t first_epoch =
            (terms.position_count - terms.start.position) / step_rows;  // steps in the epoch it starts in
        const std::uint64_t steps =
            first_epoch + (terms.epochs - terms.start.epoch - 1) * (terms.position_count / step_rows);
        const auto ranks = batches_of_ranks(terms);
        for (const auto& rank : ranks) {
            CHECK(rank.size() == steps);
            CHECK(std::ranges::all_of(
                rank, [&](const rank_batch& batch) { return batch.row_count == terms.batch_rows; }));
            if (!rank.empty()) CHECK(rank.back().end.position == 0);  // nobody continues with the tail
        }
        const counts taken = taken_by(ranks);
        CHECK(taken.size() == steps * step_rows);
        CHECK(std::ranges::all_of(taken, [](const auto& each) { return each.second == 1; }));
    }
}

TEST_CASE("schedule: ranks agree on where a step ends, and the next one begins there") {
    std::mt19937_64 random(3);
    for (int i = 0; i < draws; ++i) {
        const schedule_terms terms = draw(random);
        INFO(spelled(terms));
        std::map<std::pair<std::uint64_t, std::uint64_t>, epoch_position> ends;  // by where the step begins
        for (const auto& rank : batches_of_ranks(terms)) {
            const rank_batch* before = nullptr;
            for (const rank_batch& batch : rank) {
                const auto [found, is_new] =
                    ends.try_emplace({batch.begin.epoch, batch.begin.position}, batch.end);
                CHECK(found->second == batch.end);
                // only in the last step of an epoch may a rank have no batch
                if (before != nullptr && before->epoch == batch.epoch) CHECK(before->end == batch.begin);
                if (before != nullptr && before->epoch != batch.epoch) CHECK(before->last_of_epoch);
                before = &batch;
            }
        }
    }
}

TEST_CASE("schedule: after any interruption, what is left comes once, at any world and batch size") {
    std::mt19937_64 random(4);
    for (int i = 0; i < draws; ++i) {
        const schedule_terms terms = draw(random);
        const auto ranks = batches_of_ranks(terms);
        const auto& some_rank = ranks[random() % ranks.size()];
        if (some_rank.empty()) continue;
        const epoch_position stop = some_rank[random() % some_rank.size()].end;
        counts taken;
        for (const auto& rank : ranks) {
            for (const rank_batch& batch : rank) {
                if (!is_before(stop, batch.end)) add(taken, batch);
            }
        }
        schedule_terms other = draw(random);
        other.position_count = terms.position_count;
        other.epochs = terms.epochs;
        other.start = stop;
        INFO(spelled(terms) << ", then " << spelled(other));
        for (const auto& rank : batches_of_ranks(other)) {
            for (const rank_batch& batch : rank)
                add(taken, batch);
        }
        CHECK(taken == all_from(terms.start, terms.position_count, terms.epochs));
    }
}

TEST_CASE("schedule: after any interruption, the same world and batch size give the batches that were left") {
    std::mt19937_64 random(5);
    for (int i = 0; i < draws; ++i) {
        schedule_terms terms = draw(random);
        terms.start = {};
        if (random() % 3 == 0) terms.tail = tail::drop;
        terms.shard.rank = static_cast<unsigned>(random() % terms.shard.world);
        INFO(spelled(terms) << ", rank " << terms.shard.rank);
        const auto whole = batches_of(schedule(terms));
        for (std::size_t done = 0; done < whole.size(); ++done) {
            schedule_terms rest = terms;
            rest.start = whole[done].end;
            const auto batches = batches_of(schedule(rest));
            CHECK(std::ranges::equal(batches, std::span(whole).subspan(done + 1)));
        }
    }
}

TEST_CASE(
    "schedule: after any number of steps all ranks are at the same position, even without rows in the last") {
    std::mt19937_64 random(7);
    for (int i = 0; i < draws; ++i) {
        schedule_terms terms = draw(random);
        if (random() % 3 == 0) terms.tail = tail::drop;
        const auto ranks = batches_of_ranks(terms);
        std::map<std::pair<std::uint64_t, std::uint64_t>, epoch_position>
            ends;  // of every step, in their order
        for (const auto& rank : ranks) {
            for (const rank_batch& batch : rank)
                ends.emplace(std::pair(batch.begin.epoch, batch.begin.position), batch.end);
        }
        const std::uint64_t count = 1 + random() % (ends.size() + 3);
        INFO(spelled(terms) << ", " << count << " steps");
        epoch_position end = terms.start;
        if (count >= ends.size()) {
            end = schedule(terms).end();
        } else {
            end = std::next(ends.begin(), static_cast<std::ptrdiff_t>(count - 1))->second;
        }
        terms.max_steps = count;
        for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
            terms.shard.rank = static_cast<unsigned>(rank);
            const schedule limited(terms);
            CHECK(limited.end() == end);
            std::vector<rank_batch> expected;
            std::uint64_t rows = 0;
            for (const rank_batch& batch : ranks[rank]) {
                if (is_before(end, batch.end)) break;
                expected.push_back(batch);
                rows += batch.row_count;
            }
            CHECK(batches_of(limited) == expected);
            CHECK(limited.row_count() == rows);
        }
    }
}

TEST_CASE("schedule: counts its rows, and the batches of a whole epoch") {
    std::mt19937_64 random(6);
    for (int i = 0; i < 200; ++i) {
        schedule_terms terms = draw(random);
        if (random() % 3 == 0) terms.tail = tail::drop;
        terms.shard.rank = static_cast<unsigned>(random() % terms.shard.world);
        INFO(spelled(terms) << ", rank " << terms.shard.rank);
        const schedule schedule(terms);
        std::uint64_t rows = 0;
        std::uint64_t last_epoch_batches = 0;
        for (const rank_batch& batch : batches_of(schedule)) {
            rows += batch.row_count;
            if (batch.epoch + 1 == terms.epochs) ++last_epoch_batches;
        }
        CHECK(schedule.row_count() == rows);
        if (terms.start.epoch + 1 < terms.epochs) CHECK(schedule.batches_per_epoch() == last_epoch_batches);
    }
}

TEST_CASE("schedule: at the end of all epochs, and past it, nothing is left") {
    for (const std::uint64_t epoch : {2U, 3U}) {
        const schedule schedule({.position_count = 10, .batch_rows = 3, .epochs = 2, .start = {epoch, 0}});
        CHECK(schedule.batch_count() == 0);
        CHECK(schedule.row_count() == 0);
        CHECK(schedule.end() == epoch_position{epoch, 0});
    }
    CHECK(schedule({.position_count = 10, .batch_rows = 3, .epochs = 2}).end() == epoch_position{2, 0});
    CHECK(schedule({.position_count = 0, .batch_rows = 3, .epochs = 2}).batch_count() == 0);
    const schedule none(
        {.position_count = 10, .batch_rows = 3, .epochs = 2, .start = {1, 3}, .max_steps = 0});
    CHECK(none.batch_count() == 0);
    CHECK(none.end() == epoch_position{1, 3});
    CHECK(schedule({.position_count = 10, .batch_rows = 3, .epochs = 0}).batch_count() == 0);
}

TEST_CASE("schedule: is right for numbers that need all of 64 bits") {
    constexpr unsigned world = ~0U;
    const auto check = [&](std::uint64_t position_count, std::uint64_t batch_rows) {
        CAPTURE(batch_rows);
        // the parts of neighbouring ranks meet, from the first to the last
        std::uint64_t batches = 0;
        for (const unsigned rank : {0U, 1U, world / 2, world - 2}) {
            const schedule one(
                {.position_count = position_count, .batch_rows = batch_rows, .shard = {rank, world}});
            const schedule next(
                {.position_count = position_count, .batch_rows = batch_rows, .shard = {rank + 1, world}});
            const rank_batch tail = one.at(one.batch_count() - 1);
            const rank_batch next_tail = next.at(next.batch_count() - 1);
            CHECK(tail.position + tail.row_count == next_tail.position);
            CHECK(tail.end == epoch_position{1, 0});
            if (rank == 0) CHECK(tail.position == tail.begin.position);
            if (rank == world - 2) CHECK(next_tail.position + next_tail.row_count == position_count);
            if (rank == 0) batches = one.batch_count();
            CHECK(one.batch_count() == batches);
        }
    };
    // tails of nearly a step
    check(1001 * (std::uint64_t{world} << 20) - 1, std::uint64_t{1} << 20);
    check(2 * (std::uint64_t{world} << 29) - 1, std::uint64_t{1} << 29);
    // steps that are longer than an epoch, or whose row count overflows 64 bits
    check((std::uint64_t{1} << 62) - 1, (std::uint64_t{1} << 31));
    check((std::uint64_t{1} << 62) - 1, ~std::uint64_t{0});
}

TEST_CASE("schedule: refuses impossible terms, and gives the reason") {
    const auto refusal = [](const schedule_terms& terms) {
        try {
            const schedule schedule(terms);
        } catch (const invalid_argument& failure) {
            return std::string(failure.what());
        }
        return std::string("it was not refused");
    };
    CHECK(refusal({.position_count = 1, .batch_rows = 0}).find("at least one row") != std::string::npos);
    CHECK(refusal({.position_count = 1, .shard = {2, 2}}).find("no rank 2 among 2") != std::string::npos);
    CHECK(refusal({.position_count = 1, .shard = {0, 0}}).find("no rank 0 among 0") != std::string::npos);
    CHECK(refusal({.position_count = 9, .start = {0, 9}}).find("position 9") != std::string::npos);
    CHECK(refusal({.position_count = 3, .epochs = ~std::uint64_t{0}}).find("too many") != std::string::npos);
}
