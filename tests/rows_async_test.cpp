#include <doctest/doctest.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_tables.hpp"
#include "tests/support/sanitized.hpp"

using namespace pinflow;

namespace {

constexpr std::uint64_t row_bytes = 200;
constexpr std::uint64_t row_count = 300;

/// What an exchange writes to too early shows within so many looks at it.
constexpr int looks = 50;

/// Room for few rows at a time, though not so few that more is enqueued behind a gate than CUDA takes, which
/// lets some hundred operations wait in a stream.
row_exchange_options through_few_slots(row_route route) {
    return {.route = route, .threads = 2, .staging_bytes = 40 * row_bytes};
}

}  // namespace

TEST_CASE(
    "rows: an asynchronous gather begins when its stream comes to it, and sees the rows as they are then" *
    held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(30);
        const auto old_content = random_bytes(row_count * row_bytes, random);
        const auto new_content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, old_content);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        for (const id_place place : every_id_place) {
            if (route == row_route::copy && place == id_place::device) continue;
            std::ranges::copy(old_content, table.bytes().begin());
            const id_vector ids = make_ids(id_order::random, 500, row_count, random);
            const id_list list(device, ids, place);
            const guarded_rows rows(device, ids.size() * row_bytes, 1);
            const auto before = rows.content();
            const stream stream(device);
            gate gate;
            hold(stream, gate);
            stream.host_function_async([&] { std::ranges::copy(new_content, table.bytes().begin()); });
            exchange.gather_async(list.get(), rows.data(), stream);
            event gathered_all(device);
            gathered_all.record(stream);
            for (int look = 0; look < looks; ++look)
                REQUIRE(rows.holds(before));
            CHECK_FALSE(gathered_all.done());
            gate.open();
            gathered_all.synchronize();
            CHECK(rows.holds(gathered(new_content, row_bytes, ids)));
        }
    });
}

TEST_CASE("rows: an asynchronous scatter begins when its stream comes to it, with the rows as they are then" *
          held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(31);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        const id_vector ids = make_ids(id_order::random, 200, row_count, random);
        const guarded_table new_rows(device, random_bytes(ids.size() * row_bytes, random));
        const guarded_rows rows(device, ids.size() * row_bytes);
        const stream stream(device);
        gate gate;
        hold(stream, gate);
        copy_to_device_async(rows.data(), new_rows.bytes(), stream);
        exchange.scatter_async(ids_of(ids), rows.data(), duplicate_policy::last, stream);
        for (int look = 0; look < looks; ++look)
            REQUIRE(table.holds(before));
        gate.open();
        stream.synchronize();
        CHECK(table.holds(scattered(before, row_bytes, ids, new_rows.bytes())));
    });
}

TEST_CASE("rows: what is gathered after a scatter in the same stream is what was scattered" * held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(32);
        auto expected = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, expected);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        const stream stream(device);
        gate gate;
        hold(stream, gate);
        std::vector<guarded_rows> sources;
        std::vector<guarded_rows> destinations;
        std::vector<std::vector<std::byte>> results;
        for (int step = 0; step < 3; ++step) {
            const id_vector written = make_ids(id_order::random, 100, row_count, random);
            const id_vector read = make_ids(id_order::random, 100, row_count, random);
            const auto content = random_bytes(written.size() * row_bytes, random);
            sources.emplace_back(device, content, 3);
            destinations.emplace_back(device, read.size() * row_bytes, 5);
            exchange.scatter_async(ids_of(written), sources.back().data(), duplicate_policy::last, stream);
            exchange.gather_async(ids_of(read), destinations.back().data(), stream);
            expected = scattered(std::move(expected), row_bytes, written, content);
            results.push_back(gathered(expected, row_bytes, read));
        }
        gate.open();
        stream.synchronize();
        CHECK(table.holds(expected));
        for (std::size_t step = 0; step < results.size(); ++step)
            CHECK(destinations[step].holds(results[step]));
    });
}

TEST_CASE("rows: a batch gathered in one stream and scattered from another waits for the event between them" *
          held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(33);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        const stream in(device);
        const stream out(device);
        gate gate;
        hold(in, gate);
        const guarded_rows rows(device, 100 * row_bytes);
        id_vector from(100);
        id_vector to(100);
        std::iota(from.begin(), from.end(), 0);
        std::iota(to.begin(), to.end(), 150);
        std::ranges::shuffle(from, random);
        std::ranges::shuffle(to, random);
        exchange.gather_async(ids_of(from), rows.data(), in);
        event there(device);
        there.record(in);
        out.wait(there);
        exchange.scatter_async(ids_of(to), rows.data(), duplicate_policy::last, out);
        gate.open();
        out.synchronize();
        CHECK(table.holds(scattered(before, row_bytes, to, gathered(before, row_bytes, from))));
    });
}

TEST_CASE("rows: gathers in one stream and scatters in another go on side by side" * held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(34);
        auto expected = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, expected);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        constexpr std::uint64_t half = row_count / 2;
        const stream in(device);
        const stream out(device);
        std::vector<guarded_rows> destinations;
        std::vector<guarded_rows> sources;
        std::vector<std::vector<std::byte>> results;
        const auto before = expected;
        gate gate;
        hold(in, gate);
        for (int step = 0; step < 8; ++step) {
            const id_vector read = make_ids(id_order::random, 100, half, random);
            id_vector written = make_ids(id_order::random, 100, half, random);
            for (std::uint64_t& id : written)
                id += half;
            const auto content = random_bytes(written.size() * row_bytes, random);
            destinations.emplace_back(device, read.size() * row_bytes);
            sources.emplace_back(device, content);
            exchange.gather_async(ids_of(read), destinations.back().data(), in);
            exchange.scatter_async(ids_of(written), sources.back().data(), duplicate_policy::last, out);
            expected = scattered(std::move(expected), row_bytes, written, content);
            results.push_back(gathered(before, row_bytes, read));
            // scatters do not wait for gathers that cannot begin
            if (step == 4) {
                event written_so_far(device);
                written_so_far.record(out);
                CHECK(written_so_far.synchronize_for(std::chrono::seconds(20)));
                CHECK(table.holds(expected));
                gate.open();
            }
        }
        in.synchronize();
        out.synchronize();
        CHECK(table.holds(expected));
        for (std::size_t step = 0; step < results.size(); ++step)
            CHECK(destinations[step].holds(results[step]));
    });
}

TEST_CASE("rows: a call in one stream does not wait for one in another that waits for it" * held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(39);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        const id_vector ids = make_ids(id_order::random, 100, row_count, random);
        const guarded_rows first(device, ids.size() * row_bytes);
        const guarded_rows second(device, ids.size() * row_bytes);
        const stream waiting(device);
        const stream waited_for(device);
        for (const bool is_gather : {true, false}) {
            const auto enqueue = [&](const guarded_rows& rows, stream_view stream) {
                if (is_gather) exchange.gather_async(ids_of(ids), rows.data(), stream);
                if (!is_gather)
                    exchange.scatter_async(ids_of(ids), rows.data(), duplicate_policy::last, stream);
            };
            gate gate;
            hold(waiting, gate);
            enqueue(first, waiting);
            enqueue(second, waited_for);
            event passed(device);
            passed.record(waited_for);
            CHECK(passed.synchronize_for(std::chrono::seconds(20)));
            CHECK(second.holds(gathered(before, row_bytes, ids)));
            gate.open();
            waiting.synchronize();
            CHECK(first.holds(gathered(before, row_bytes, ids)));
        }
        CHECK(table.holds(before));
    });
}

TEST_CASE("rows: indices in host memory are the caller's again when an asynchronous call returns" *
          held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(35);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        const id_vector ids = make_ids(id_order::random, 200, row_count, random);
        const guarded_rows first(device, ids.size() * row_bytes);
        const guarded_rows second(device, ids.size() * row_bytes);
        const stream stream(device);
        gate gate;
        hold(stream, gate);
        id_vector list = ids;
        exchange.gather_async(ids_of(list), first.data(), stream);
        std::ranges::fill(list, ~std::uint64_t{0});
        {
            auto short_lived = std::make_unique<id_vector>(ids);
            std::ranges::reverse(*short_lived);
            const row_gather batch{ids_of(*short_lived), second.data()};
            exchange.gather_group_async({&batch, 1}, stream);
        }
        list = make_ids(id_order::few, 200, row_count, random);
        const id_vector written = list;
        const auto content = random_bytes(list.size() * row_bytes, random);
        const guarded_rows source(device, content);
        exchange.scatter_async(ids_of(list), source.data(), duplicate_policy::last, stream);
        std::ranges::fill(list, row_count);
        gate.open();
        stream.synchronize();
        exchange.check();
        CHECK(first.holds(gathered(before, row_bytes, ids)));
        CHECK(second.holds(gathered(before, row_bytes, {ids.rbegin(), ids.rend()})));
        CHECK(table.holds(scattered(before, row_bytes, written, content)));
    });
}

TEST_CASE("rows: a thousand calls are enqueued one behind the other, more than CUDA lets wait in a stream") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(40);
        auto expected = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, expected);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        const stream stream(device);
        const id_vector read = make_ids(id_order::random, 20, row_count, random);
        const guarded_rows rows(device, read.size() * row_bytes);
        constexpr int calls_each_way = sanitized ? 50 : 500;
        for (int call = 0; call < calls_each_way; ++call) {
            const id_vector written = make_ids(id_order::random, read.size(), row_count, random);
            exchange.gather_async(ids_of(read), rows.data(), stream);
            exchange.scatter_async(ids_of(written), rows.data(), duplicate_policy::last, stream);
            const auto moved = gathered(expected, row_bytes, read);
            expected = scattered(std::move(expected), row_bytes, written, moved);
        }
        stream.synchronize();
        exchange.check();
        CHECK(table.holds(expected));
    });
}

TEST_CASE("rows: calls from several threads are enqueued one at a time, and each gets its own rows") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(36);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        constexpr std::uint64_t readable = 100;  // each thread writes to 50 of the others
        std::atomic<int> wrong = 0;
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 4; ++t) {
            threads.emplace_back([&, t] {
                std::mt19937_64 own_random(t);
                const stream stream(device);
                const guarded_rows rows(device, 120 * row_bytes);
                for (int i = 0; i < 15; ++i) {
                    id_vector ids = make_ids(id_order::random, 120, readable, own_random);
                    if (i % 2 == 0) {
                        exchange.gather(ids_of(ids), rows.data());
                    } else {
                        exchange.gather_async(ids_of(ids), rows.data(), stream);
                        stream.synchronize();
                    }
                    if (!rows.holds(gathered(before, row_bytes, ids))) ++wrong;
                    // scattered to rows of this thread's own, and read again
                    for (std::uint64_t& id : ids)
                        id = readable + t * 50 + id % 50;
                    exchange.scatter(ids_of(ids), rows.data());
                    const auto written = rows.content();
                    exchange.gather(ids_of(ids), rows.data());
                    const auto expected =
                        scattered(std::vector<std::byte>(row_count * row_bytes), row_bytes, ids, written);
                    if (!rows.holds(gathered(expected, row_bytes, ids))) ++wrong;
                }
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        CHECK(wrong == 0);
        CHECK(table.sentinels_left());
    });
}

TEST_CASE("rows: a call made by a TBB task takes up no other task meanwhile, which might call too") {
    // several tasks' worth; loops that are not isolated are found in a run of five, on two cores
    constexpr std::size_t id_count = 300'000;
    std::mt19937_64 random(41);
    const device host = device::host();
    const guarded_table table(host, random_bytes(row_count * 8, random));
    row_exchange exchange(row_table(table.bytes(), 8), host);
    const id_vector ids = make_ids(id_order::random, id_count, row_count, random);
    const stream stream(host);
    const device_buffer rows(id_count * 8, stream);
    std::atomic<int> nested = 0;
    std::atomic<int> calls = 0;
    const tbb::global_control more_threads(tbb::global_control::max_allowed_parallelism, 4);
    tbb::task_arena arena(4);
    constexpr int tasks = sanitized ? 200 : 1000;
    arena.execute([&] {
        tbb::parallel_for(0, tasks, [&](int task) {
            thread_local bool calling = false;
            if (calling) {
                ++nested;
                return;
            }
            if (task % 4 != 0) return;  // whoever has these comes to help with a call's own loops
            calling = true;
            exchange.gather_async(ids_of(ids), rows.data(), stream);
            calling = false;
            ++calls;
        });
    });
    stream.synchronize();
    CHECK(nested == 0);
    CHECK(calls == tasks / 4);
}

TEST_CASE("rows: a call that is waited for tells its own faults to its own caller") {
    on_each_device([](const device& device) {
        const guarded_table table(device, row_count * row_bytes);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device);
        std::atomic<int> told = 0;
        std::atomic<int> told_wrongly = 0;
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 4; ++t) {
            threads.emplace_back([&, t] {
                const guarded_rows rows(device, 10 * row_bytes);
                for (int i = 0; i < 50; ++i) {
                    // wrong ones of one's own number, or right ones
                    const bool is_wrong = i % 2 == 0;
                    const id_list ids(device, {1, is_wrong ? 10'000 + t : 2}, id_place::device);
                    const std::string why =
                        sentence_of<invalid_argument>([&] { exchange.gather(ids.get(), rows.data()); });
                    if (is_wrong && contains(why, "the first is " + std::to_string(10'000 + t)))
                        ++told;
                    else if (is_wrong || !why.empty())
                        ++told_wrongly;
                    exchange.check();
                }
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        CHECK(told == 100);
        CHECK(told_wrongly == 0);
    });
}

// ---- the end ------------------------------------------------------------------------------------

TEST_CASE("rows: an exchange stays until the streams have passed its calls" * held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(37);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        const id_vector read = make_ids(id_order::random, 400, row_count, random);
        const id_vector written = make_ids(id_order::random, 100, row_count, random);
        const auto content = random_bytes(written.size() * row_bytes, random);
        const guarded_rows source(device, content);
        const guarded_rows destination(device, read.size() * row_bytes);
        const stream in(device);
        const stream out(device);
        gate gate;
        std::atomic<bool> opened = false;
        std::optional<row_exchange> exchange(std::in_place, row_table(table.bytes(), row_bytes), device,
                                             through_few_slots(route));
        event read_all(device);
        hold(in, gate);
        exchange->gather_async(ids_of(read), destination.data(), in);
        read_all.record(in);
        out.wait(read_all);
        exchange->scatter_async(ids_of(written), source.data(), duplicate_policy::last, out);
        std::thread opener([&] {
            // long enough for a destructor that does not wait
            for (int look = 0; look < looks; ++look)
                std::this_thread::yield();
            opened = true;
            gate.open();
        });
        exchange.reset();
        CHECK(opened);
        opener.join();
        in.synchronize();
        out.synchronize();
        CHECK(destination.holds(gathered(before, row_bytes, read)));
        CHECK(table.holds(scattered(before, row_bytes, written, content)));
    });
}

TEST_CASE("rows: an exchange that is moved goes on, one moved from can be assigned to" * held_back) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(38);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, content);
        const id_vector ids = make_ids(id_order::random, 50, row_count, random);
        const guarded_rows rows(device, ids.size() * row_bytes);
        row_exchange first(row_table(table.bytes(), row_bytes), device, through_few_slots(route));
        const stream stream(device);
        gate gate;
        hold(stream, gate);
        first.gather_async(ids_of(ids), rows.data(), stream);
        row_exchange second(std::move(first));
        gate.open();
        stream.synchronize();
        CHECK(rows.holds(gathered(content, row_bytes, ids)));
        first = row_exchange(row_table(table.bytes(), 2 * row_bytes), device, {.route = route});
        CHECK(first.table().row_count() == row_count / 2);
        std::swap(first, second);
        CHECK(first.table().row_count() == row_count);
        const guarded_rows again(device, ids.size() * row_bytes);
        first.gather(ids_of(ids), again.data());
        CHECK(again.holds(gathered(content, row_bytes, ids)));
    });
}
