#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "child_process.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"
#include "small_exchange.hpp"

// Asynchronous calls begin when their stream comes to them.
using namespace pinflow;

TEST_CASE(
    "rows: an asynchronous gather begins when its stream comes to it, and sees the rows as they are then" *
    blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(30);
        const auto old_content = random_bytes(row_count * row_bytes, random);
        const auto new_content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, old_content);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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
          blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(31);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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

TEST_CASE("rows: what is gathered after a scatter in the same stream is what was scattered" *
          blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(32);
        auto expected = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, expected);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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
          blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(33);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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

TEST_CASE("rows: gathers in one stream and scatters in another run side by side" * blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(34);
        auto expected = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, expected);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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

TEST_CASE("rows: a call in one stream does not wait for a call in a blocked stream" * blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(39);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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
          blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(35);
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, before);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device, with_small_staging(route));
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

TEST_CASE("rows: in a forked process, an exchange is destroyed without waiting for calls of its parent") {
    const device host = device::host();
    for (const row_route route : {row_route::direct, row_route::staged, row_route::hybrid}) {
        CAPTURE(to_string(route));
        std::mt19937_64 random(35);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(host, content);
        std::optional<row_exchange> exchange(std::in_place, row_table(table.bytes(), row_bytes), host,
                                             with_small_staging(route));
        const id_vector ids = make_ids(id_order::random, 500, row_count, random);
        const guarded_rows rows(host, ids.size() * row_bytes);
        const stream stream(host);
        gate gate;
        hold(stream, gate);
        exchange->gather_async(ids_of(ids), rows.data(), stream);
        CHECK(holds_in_child([&] {
            ::alarm(20);
            exchange.reset();
            return true;
        }));
        gate.open();
        stream.synchronize();
        CHECK(rows.holds(gathered(content, row_bytes, ids)));
    }
}
