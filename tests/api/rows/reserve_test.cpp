#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "counting_resource.hpp"
#include "devices.hpp"
#include "file_bytes.hpp"
#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"
#include "small_exchange.hpp"

// What an exchange reserves for its calls, and what happens when that is used up.
using namespace pinflow;

TEST_CASE("rows: an asynchronous call with more than max_batch_rows rows throws, a synchronous call works") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(51);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, content);
        row_exchange_options options = with_small_staging(route);
        options.max_batch_rows = 50;
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, options);
        const stream stream(device);
        const id_vector ids = make_ids(id_order::random, 51, row_count, random);
        const guarded_rows rows(device, ids.size() * row_bytes);
        const std::vector<std::byte> rows_before = rows.content();
        CHECK(contains_all(
            message_of<invalid_argument>([&] { exchange.gather_async(ids_of(ids), rows.data(), stream); }),
            {"51 rows", "up to 50", "max_batch_rows"}));
        CHECK_THROWS_AS(exchange.scatter_async(ids_of(ids), rows.data(), duplicate_policy::last, stream),
                        invalid_argument);
        stream.synchronize();
        CHECK(rows.holds(rows_before));
        CHECK(table.holds(content));
        exchange.gather(ids_of(ids), rows.data());
        CHECK(rows.holds(gathered(content, row_bytes, ids)));
        if (route != row_route::copy) {
            const id_list on_device(device, ids, id_place::device);
            const guarded_rows others(device, ids.size() * row_bytes);
            exchange.gather(on_device.get(), others.data());
            CHECK(others.holds(gathered(content, row_bytes, ids)));
        }
        exchange.scatter(ids_of(ids), rows.data());
        CHECK(table.holds(content));
        const id_vector wrong(60, to_id(-1));
        CHECK_THROWS_AS(exchange.gather(ids_of(wrong), rows.data()), invalid_argument);
    });
}

TEST_CASE("rows: a group that is larger than a call makes several calls, if that many can be in flight") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(52);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, content);
        row_exchange_options options = with_small_staging(route);
        options.max_batch_rows = 50;
        options.max_calls_in_flight = 8;
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, options);
        const stream stream(device);
        constexpr std::uint64_t count = 20;
        const auto group_of = [&](std::size_t batches, std::vector<id_vector>& ids,
                                  const guarded_rows& rows) {
            std::vector<row_gather> group;
            for (std::size_t i = 0; i < batches; ++i) {
                // an empty batch is between the others
                ids.push_back(i == 2 ? id_vector{} : make_ids(id_order::random, count, row_count, random));
                group.push_back({ids_of(ids.back()), rows.data() + i * count * row_bytes});
            }
            return group;
        };
        std::vector<id_vector> ids;
        ids.reserve(20);
        const guarded_rows rows(device, 9 * count * row_bytes);
        const std::vector<row_gather> group = group_of(9, ids, rows);  // four calls
        exchange.gather_group_async(group, stream);
        stream.synchronize();
        exchange.check();
        const std::vector<std::byte> arrived = rows.content();
        for (std::size_t i = 0; i < group.size(); ++i) {
            const auto expected = gathered(content, row_bytes, ids[i]);
            CHECK(std::equal(expected.begin(), expected.end(), arrived.data() + i * count * row_bytes));
        }
        std::vector<row_gather> larger = group;
        larger.insert(larger.end(), group.begin(), group.end());
        CHECK(contains_all(message_of<invalid_argument>([&] { exchange.gather_group_async(larger, stream); }),
                           {"18 batches", "8 calls", "up to 4", "max_calls_in_flight"}));
        std::vector<row_scatter> back;
        for (const row_gather& each : group)
            back.push_back({each.ids, each.destination});
        exchange.scatter_group_async(back, duplicate_policy::last, stream);
        CHECK_THROWS_AS(exchange.scatter_group_async(back, duplicate_policy::sum, stream), unsupported);
        stream.synchronize();
        CHECK(table.holds(content));
    });
}

TEST_CASE("rows: max_batch_rows and max_calls_in_flight out of range are refused") {
    on_each_device([](const device& device) {
        const guarded_table table(device, std::vector<std::byte>(4096));
        const auto refused = [&](const row_exchange_options& options) {
            return message_of<invalid_argument>(
                [&] { row_exchange(row_table(table.bytes(), 64), device, options); });
        };
        CHECK(contains(refused({.max_batch_rows = 0}), "max_batch_rows"));
        CHECK(contains(refused({.max_batch_rows = std::uint64_t{1} << 32}), "max_batch_rows"));
        CHECK(contains(refused({.max_calls_in_flight = 0}), "max_calls_in_flight"));
        CHECK(contains(refused({.max_calls_in_flight = 5000}), "max_calls_in_flight"));
    });
}

TEST_CASE("rows: a stalled stream with all its calls in flight holds up its own callers only" *
          blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(53);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, content);
        row_exchange_options options = with_small_staging(route);
        options.max_calls_in_flight = 4;
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, options);
        const stream stalled(device);
        const stream other(device);
        const id_vector ids = make_ids(id_order::random, 20, row_count, random);
        const auto expected = gathered(content, row_bytes, ids);
        const guarded_rows stalled_rows(device, expected.size());
        const guarded_rows rows(device, expected.size());
        const guarded_rows others(device, expected.size());
        gate gate;
        hold(stalled, gate);
        std::atomic<int> enqueued = 0;
        constexpr int calls = 7;
        auto caller = std::async(std::launch::async, [&] {
            for (; enqueued < calls; ++enqueued)
                exchange.gather_async(ids_of(ids), stalled_rows.data(), stalled);
        });
        while (enqueued < 2)
            std::this_thread::yield();
        for (int i = 0; i < 20; ++i) {
            exchange.gather_async(ids_of(ids), rows.data(), other);
            exchange.check();
            exchange.gather(ids_of(ids), others.data());
        }
        other.synchronize();
        CHECK(enqueued == 2);
        gate.open();
        caller.get();
        stalled.synchronize();
        exchange.check();
        CHECK(enqueued == calls);
        CHECK(rows.holds(expected));
        CHECK(others.holds(expected));
        CHECK(stalled_rows.holds(expected));
    });
}

TEST_CASE("rows: calls take device memory from the caller's resource, and return all of it") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(54);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, content);
        row_exchange_options options = with_small_staging(route);
        const auto resource = std::make_shared<counting_resource>();
        options.device_memory = resource;
        const id_vector ids = make_ids(id_order::random, 40, row_count, random);
        const guarded_rows rows(device, ids.size() * row_bytes);
        {
            row_exchange exchange(row_table(table.bytes(), row_bytes), device, options);
            const stream stream(device);
            const int reserved = resource->allocated;
            CHECK(reserved > 0);
            // more calls than have reserved device memory
            for (int i = 0; i < 10; ++i)
                exchange.gather_async(ids_of(ids), rows.data(), stream);
            exchange.scatter_async(ids_of(ids), rows.data(), duplicate_policy::last, stream);
            stream.synchronize();
        }
        CHECK(rows.holds(gathered(content, row_bytes, ids)));
        CHECK(table.holds(content));
        CHECK(resource->allocated == resource->deallocated);
    });
}

TEST_CASE("rows: calls beyond those with reserved device memory still gather the right rows" *
          blocks_a_stream) {
    on_each_device([](const device& device) {
        constexpr std::size_t calls = 14;
        std::mt19937_64 random(55);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, content);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, {.route = row_route::direct});
        const stream held(device);
        gate gate;
        hold(held, gate);
        std::vector<id_vector> ids;
        std::vector<std::unique_ptr<guarded_rows>> rows;
        for (std::size_t i = 0; i < calls; ++i) {
            ids.push_back(make_ids(id_order::random, 20 + i, row_count, random));
            rows.push_back(std::make_unique<guarded_rows>(device, ids.back().size() * row_bytes));
            exchange.gather_async(ids_of(ids.back()), rows.back()->data(), held);
        }
        gate.open();
        held.synchronize();
        exchange.check();
        for (std::size_t i = 0; i < calls; ++i)
            CHECK(rows[i]->holds(gathered(content, row_bytes, ids[i])));
    });
}
