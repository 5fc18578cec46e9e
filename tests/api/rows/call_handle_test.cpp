#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "file_bytes.hpp"
#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"
#include "small_exchange.hpp"

// Handles of asynchronous calls. Indices in device memory are checked when the stream reaches the call.
using namespace pinflow;

namespace {

struct exchanged {
    explicit exchanged(const pinflow::device& device)
        : table(device, row_count * row_bytes),
          rows(device, 10 * row_bytes),
          stream(device),
          exchange(std::in_place, row_table(table.bytes(), row_bytes), device) {}

    guarded_table table;
    guarded_rows rows;
    pinflow::stream stream;
    std::optional<row_exchange> exchange;
};

std::string error_of(const exchange_call& call) {
    return message_of<invalid_argument>([&] { call.check(); });
}

}  // namespace

TEST_CASE("call handles: an error belongs to its call, is thrown once, and refuses no other call") {
    on_each_device([](const device& device) {
        exchanged with(device);
        const id_list right(device, {1, 2}, id_place::device);
        const id_list wrong(device, {1, 7777}, id_place::device);
        const exchange_call good = with.exchange->gather_async(right.get(), with.rows.data(), with.stream);
        const exchange_call bad = with.exchange->gather_async(wrong.get(), with.rows.data(), with.stream);
        const exchange_call worse =
            with.exchange->scatter_async(wrong.get(), with.rows.data(), duplicate_policy::last, with.stream);
        with.stream.synchronize();
        with.exchange->gather(right.get(), with.rows.data());
        with.exchange->scatter(right.get(), with.rows.data());
        exchange_call copy;
        copy = bad;
        good.check();
        CHECK(contains_all(error_of(copy), {"not gathered", "7777"}));
        CHECK(error_of(bad).empty());
        CHECK(contains_all(message_of<invalid_argument>([&] { with.exchange->check(); }),
                           {"not scattered", "7777"}));
        CHECK(error_of(worse).empty());
        with.exchange->check();
        exchange_call().check();
    });
}

TEST_CASE("call handles: a call has no error before its stream has passed it" * blocks_a_stream) {
    on_each_device([](const device& device) {
        exchanged with(device);
        const id_list wrong(device, {7777}, id_place::device);
        gate gate;
        hold(with.stream, gate);
        const exchange_call call = with.exchange->gather_async(wrong.get(), with.rows.data(), with.stream);
        call.check();
        with.exchange->check();
        gate.open();
        with.stream.synchronize();
        CHECK(contains(error_of(call), "7777"));
    });
}

TEST_CASE("call handles: a handle outlives its exchange, and keeps the error of its call") {
    on_each_device([](const device& device) {
        exchanged with(device);
        const id_list right(device, {1}, id_place::device);
        const id_list wrong(device, {7777}, id_place::device);
        const exchange_call bad = with.exchange->gather_async(wrong.get(), with.rows.data(), with.stream);
        const exchange_call good = with.exchange->gather_async(right.get(), with.rows.data(), with.stream);
        with.exchange.reset();
        CHECK(contains(error_of(bad), "7777"));
        CHECK(error_of(bad).empty());
        good.check();
    });
}

TEST_CASE("call handles: a group of more batches than one launch takes has one handle for all") {
    on_each_device([](const device& device) {
        exchanged with(device);
        constexpr std::size_t batch_count = 150;
        const guarded_rows rows(device, batch_count * row_bytes);
        std::vector<id_list> lists;
        std::vector<row_gather> batches;
        for (std::size_t i = 0; i < batch_count; ++i) {
            lists.emplace_back(device, id_vector{i == 3 || i == 140 ? 7000 + i : i}, id_place::device);
        }
        for (std::size_t i = 0; i < batch_count; ++i)
            batches.push_back({lists[i].get(), rows.data() + i * row_bytes});
        const exchange_call call = with.exchange->gather_group_async(batches, with.stream);
        with.stream.synchronize();
        CHECK(contains(error_of(call), "7003"));
        CHECK(contains(error_of(call), "7140"));
        CHECK(error_of(call).empty());
        with.exchange->check();
    });
}

TEST_CASE(
    "call handles: an exchange keeps at least the newest 1024 unread errors, but not all, and a handle keeps "
    "its own") {
    on_each_device([](const device& device) {
        exchanged with(device);
        constexpr int call_count = 1500;
        const id_list wrong(device, {7777}, id_place::device);
        std::optional<exchange_call> first;
        const id_list newest(device, {7778}, id_place::device);
        for (int i = 0; i < call_count; ++i) {
            const bool is_new = i >= call_count - 1024;
            const exchange_call call =
                with.exchange->gather_async((is_new ? newest : wrong).get(), with.rows.data(), with.stream);
            if (!first) first = call;
            if (i % 100 == 0) with.stream.synchronize();
        }
        with.stream.synchronize();
        const id_list right(device, {1}, id_place::device);
        with.exchange->gather_async(right.get(), with.rows.data(), with.stream);
        with.stream.synchronize();
        int reported = 0, reported_new = 0;
        for (;;) {
            const std::string message = message_of<invalid_argument>([&] { with.exchange->check(); });
            if (message.empty()) break;
            ++reported;
            if (contains(message, "7778")) ++reported_new;
        }
        CHECK(reported_new == 1024);
        CHECK(reported < call_count);
        CHECK(contains(error_of(*first), "7777"));
    });
}

TEST_CASE("call handles: threads that call and check get the errors of their own calls") {
    on_each_device([](const device& device) {
        exchanged with(device);
        std::atomic<int> mixed_up = 0;
        std::vector<std::thread> threads;
        for (std::uint64_t thread = 0; thread < 4; ++thread) {
            threads.emplace_back([&, thread] {
                const stream own(device);
                const guarded_rows rows(device, row_bytes);
                const id_list wrong(device, {7000 + thread}, id_place::device);
                for (int i = 0; i < 50; ++i) {
                    const exchange_call call = with.exchange->gather_async(wrong.get(), rows.data(), own);
                    own.synchronize();
                    mixed_up += contains(error_of(call), std::to_string(7000 + thread)) ? 0 : 1;
                }
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        CHECK(mixed_up == 0);
        with.exchange->check();
    });
}
