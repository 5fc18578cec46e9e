#include <doctest/doctest.h>

#include <atomic>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "file_bytes.hpp"
#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"
#include "sanitized.hpp"
#include "small_exchange.hpp"

// Many calls, calls from several threads, and the end of an exchange.
using namespace pinflow;

TEST_CASE("rows: a thousand calls are enqueued one behind the other, more than CUDA lets wait in a stream") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(40);
        auto expected = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, expected);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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

TEST_CASE("rows: calls from several threads do not disturb each other, and each gets its own rows") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(36);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
        // all threads read rows 0 to 99; thread t alone writes the 50 rows from 100 + 50 t on
        constexpr std::uint64_t readable = 100;
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

TEST_CASE("rows: a synchronous call reports its own errors to its own caller") {
    on_each_device([](const device& device) {
        const guarded_table table(device, row_count * row_bytes);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device);
        std::atomic<int> reported = 0;
        std::atomic<int> misreported = 0;
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 4; ++t) {
            threads.emplace_back([&, t] {
                const guarded_rows rows(device, 10 * row_bytes);
                for (int i = 0; i < 50; ++i) {
                    // either one wrong index, whose value names the thread, or right indices
                    const bool is_wrong = i % 2 == 0;
                    const id_list ids(device, {1, is_wrong ? 10'000 + t : 2}, id_place::device);
                    const std::string reason =
                        message_of<invalid_argument>([&] { exchange.gather(ids.get(), rows.data()); });
                    if (is_wrong && contains(reason, "the first is " + std::to_string(10'000 + t)))
                        ++reported;
                    else if (is_wrong || !reason.empty())
                        ++misreported;
                    exchange.check();
                }
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        CHECK(reported == 100);
        CHECK(misreported == 0);
    });
}

// ---- the end ------------------------------------------------------------------------------------

TEST_CASE("rows: an exchange stays until the streams have passed its calls" * blocks_a_stream) {
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
                                             with_small_staging(route));
        event read_all(device);
        hold(in, gate);
        exchange->gather_async(ids_of(read), destination.data(), in);
        read_all.record(in);
        out.wait(read_all);
        exchange->scatter_async(ids_of(written), source.data(), duplicate_policy::last, out);
        std::thread opener([&] {
            // long enough that a destructor that does not wait returns before the gate opens
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

TEST_CASE("rows: an exchange that is moved continues, one moved from can be assigned to" * blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(38);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, content);
        const id_vector ids = make_ids(id_order::random, 50, row_count, random);
        const guarded_rows rows(device, ids.size() * row_bytes);
        row_exchange first(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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
