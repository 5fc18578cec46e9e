#include "src/rows/calls_in_flight.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"

using namespace pinflow;
using detail::calls_in_flight;
using detail::index_errors;
using detail::pending_call;
using detail::taken_memory;

namespace {

constexpr std::uint64_t max_rows = 10;

struct logged {
    explicit logged(const device& device, unsigned max_calls = 16)
        : log(device, max_rows, max_calls), stream(device) {}

    /// Adds a call of 10 indices into a table of 5 rows. `outside` of them are out of range, the first at
    /// position 3. `repeated` are repeated, the first at position 4.
    std::shared_ptr<pending_call> add(unsigned outside, unsigned repeated = 0, bool is_listed = true) {
        std::vector<taken_memory> memory = log.take(stream, 1);
        CHECK(memory[0]->errors().report->outside_count == 0);
        CHECK(memory[0]->errors().report->repeated_count == 0);
        *memory[0]->errors().report = {.outside_count = outside,
                                       .outside_position = 3,
                                       .outside_id = 70 + outside,
                                       .repeated_count = repeated,
                                       .repeated_position = 4,
                                       .repeated_id = 2};
        auto call = std::make_shared<pending_call>(pending_call::facts{
            .what = "rows were not moved", .count = 10, .row_count = 5, .is_listed = is_listed});
        log.put_in_flight(memory[0], stream, call);
        CHECK_FALSE(memory[0]);
        return call;
    }
    std::string checked() {
        return message_of<error>([&] { log.check(); });
    }
    std::string checked(pending_call& call) {
        return message_of<error>([&] { log.check(call); });
    }

    calls_in_flight log;
    pinflow::stream stream;
};

/// Takes the memory of `wanted` calls of `stream`, one call at a time.
std::vector<taken_memory> take_all(calls_in_flight& calls, const stream& stream, std::size_t wanted) {
    std::vector<taken_memory> all;
    while (all.size() < wanted)
        all.push_back(std::move(calls.take(stream, 1)[0]));
    return all;
}

}  // namespace

TEST_CASE("calls_in_flight: reports each call with errors once, in the order of the calls") {
    on_each_device([](const device& device) {
        logged with(device);
        with.log.check();
        with.add(1);
        with.add(0);
        with.add(2, 1);
        with.add(0, 3);
        with.stream.synchronize();
        CHECK(contains_all(with.checked(), {"rows were not moved", "1 of 10", "is outside", "has 5 rows",
                                            "the first is 71,", "at position 3"}));
        CHECK(contains_all(with.checked(), {"rows were not moved", "2 of 10", "are outside", "has 5 rows",
                                            "the first is 72,", "at position 3"}));
        CHECK(contains_all(with.checked(), {"rows were not moved", "3 of 10", "are repeated",
                                            "duplicate_policy::error", "the first is 2,", "at position 4"}));
        CHECK(with.checked().empty());
    });
}

TEST_CASE(
    "calls_in_flight: does not report a call before its stream has reached it, but reports other calls") {
    on_each_device([](const device& device) {
        logged with(device);
        const stream stuck(device);
        gate gate;
        hold(stuck, gate);
        std::vector<taken_memory> memory = with.log.take(stuck, 1);
        *memory[0]->errors().report = {.outside_count = 1, .outside_position = 0, .outside_id = 99};
        with.log.put_in_flight(
            memory[0], stuck,
            std::make_shared<pending_call>(pending_call::facts{.what = "late", .count = 1, .row_count = 1}));
        CHECK(with.checked().empty());
        with.add(1);
        with.stream.synchronize();
        CHECK(contains(with.checked(), "the first is 71"));
        CHECK(with.checked().empty());
        gate.open();
        stuck.synchronize();
        CHECK(contains(with.checked(), "late: 1 of 1 indices is outside"));
        CHECK(with.checked().empty());
    });
}

TEST_CASE("calls_in_flight: a call that is not listed reports to its handle only") {
    on_each_device([](const device& device) {
        logged with(device);
        const auto first = with.add(1, 0, false);
        const auto second = with.add(2);
        const auto third = with.add(3, 0, false);
        with.stream.synchronize();
        CHECK(contains(with.checked(*third), "the first is 73"));
        CHECK(contains(with.checked(), "the first is 72"));
        CHECK(with.checked().empty());
        CHECK(with.checked(*second).empty());
        with.log.close();
        CHECK(contains(with.checked(*first), "the first is 71"));
        CHECK(with.checked(*first).empty());
    });
}

TEST_CASE(
    "calls_in_flight: a call with exceptions and wrong indices reports one exception, and nothing else") {
    on_each_device([](const device& device) {
        logged with(device);
        const auto call = with.add(1);
        std::vector<std::thread> threads;
        for (int i = 0; i < 4; ++i) {
            threads.emplace_back([&] {
                for (int n = 0; n < 100; ++n)
                    call->add(std::make_exception_ptr(device_error("thrown by a thread")));
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        with.stream.synchronize();
        CHECK(with.checked() == "thrown by a thread");
        CHECK(with.checked().empty());
    });
}

TEST_CASE("calls_in_flight: a call that can have no errors is not reported, and its memory is reused") {
    on_each_device([](const device& device) {
        logged with(device, 1);
        std::vector<taken_memory> memory = with.log.take(with.stream, 1);
        const index_errors* const errors = memory[0]->errors().report;
        memory[0]->errors().report->outside_count = 1;
        with.log.put_in_flight(memory[0], with.stream);
        with.stream.synchronize();
        CHECK(with.checked().empty());
        CHECK(with.log.take(with.stream, 1)[0]->errors().report == errors);  // returned at once
        const auto call = with.add(1);  // nobody asks for its error before its memory is reused
        with.add(0);
        CHECK(contains(with.checked(*call), "the first is 71"));
    });
}

TEST_CASE("calls_in_flight: the errors that nobody asks for are limited, the handles have the others") {
    on_each_device([](const device& device) {
        logged with(device, 4);
        const auto first = with.add(1);
        for (std::size_t i = 0; i < calls_in_flight::max_listed; ++i)
            with.add(2);
        with.stream.synchronize();
        std::size_t count = 0;
        while (contains(with.checked(), "the first is 72"))
            ++count;
        CHECK(count == calls_in_flight::max_listed);
        CHECK(contains(with.checked(*first), "the first is 71"));
    });
}

TEST_CASE("calls_in_flight: the memory of calls that are taken together does not overlap") {
    on_each_device([](const device& device) {
        calls_in_flight calls(device, max_rows, 5);
        const stream stream(device);
        std::vector<taken_memory> all = calls.take(stream, calls.max_together());
        CHECK(all.size() == 3);
        for (std::size_t i = 0; i < all.size(); ++i) {
            std::fill_n(all[i]->ids(), max_rows, i);
            all[i]->errors().report->outside_id = i;
        }
        for (std::size_t i = 0; i < all.size(); ++i) {
            CHECK(std::count(all[i]->ids(), all[i]->ids() + max_rows, i) == max_rows);
            CHECK(all[i]->errors().report->outside_id == i);
        }
    });
}

TEST_CASE("calls_in_flight: a stream takes at most half of the calls that others do not use, rounded up") {
    const device host = device::host();
    calls_in_flight calls(host, max_rows, 8);
    const stream first(host);
    const stream second(host);
    const stream third(host);
    const stream fourth(host);
    auto of_first = take_all(calls, first, 4);
    auto of_second = take_all(calls, second, 2);
    const auto of_third = take_all(calls, third, 1);
    auto of_fourth = take_all(calls, fourth, 1);
    // all is taken, and the first stream has its share
    auto waiting = std::async(std::launch::async, [&] { return calls.take(first, 1).size(); });
    CHECK(waiting.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
    of_fourth.clear();
    CHECK(waiting.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
    CHECK(calls.take(fourth, 1).size() == 1);  // another stream does not wait for it
    of_first.clear();
    CHECK(waiting.get() == 1);
}

TEST_CASE("calls_in_flight: a stream with all its calls in flight waits for the oldest one") {
    on_each_device([](const device& device) {
        calls_in_flight calls(device, max_rows, 2);
        const stream stream(device);
        gate gate;
        hold(stream, gate);
        std::vector<taken_memory> only = calls.take(stream, 1);
        calls.put_in_flight(only[0], stream);
        std::atomic<bool> opened = false;
        auto waiting = std::async(std::launch::async, [&] {
            calls.take(stream, 1);
            return opened.load();
        });
        CHECK(waiting.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
        calls.check();  // does not wait for the thread that waits
        const pinflow::stream other(device);
        CHECK(calls.take(other, 1).size() == 1);
        opened = true;
        gate.open();
        CHECK(waiting.get());
    });
}

TEST_CASE("calls_in_flight: its destructor waits until the streams have passed the calls") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const device_buffer memory(max_rows * 8, stream);
        gate gate;
        std::atomic<bool> opened = false;
        std::thread opener;
        {
            calls_in_flight calls(device, max_rows, 2);
            std::vector<taken_memory> taken = calls.take(stream, 1);
            std::fill_n(taken[0]->ids(), max_rows, 7);
            hold(stream, gate);
            copy_to_device_async(memory.data(), {reinterpret_cast<std::byte*>(taken[0]->ids()), max_rows * 8},
                                 stream);
            calls.put_in_flight(taken[0], stream);
            opener = std::thread([&] {
                for (int i = 0; i < 50; ++i)
                    std::this_thread::yield();
                opened = true;
                gate.open();
            });
        }
        CHECK(opened);
        opener.join();
        const std::vector<std::byte> bytes = to_host(memory.data(), max_rows * 8, stream);
        CHECK(bytes[0] == std::byte{7});
        CHECK(bytes[8 * (max_rows - 1)] == std::byte{7});
    });
}

TEST_CASE("calls_in_flight: negative indices are printed as such") {
    CHECK(contains_all(detail::outside_sentence("it", 2, 3, 4, ~std::uint64_t{0}, 1),
                       {"it: ", "2 of 3", "are outside", "has 4 rows", "the first is -1,", "at position 1"}));
    CHECK(contains(detail::outside_sentence("it", 1, 3, 4, (std::uint64_t{1} << 63) - 1, 1),
                   "the first is 9223372036854775807"));
}

TEST_CASE(
    "calls_in_flight: up to eight calls at a time have scratch memory, and again once they have ended") {
    on_each_device([](const device& device) {
        constexpr std::uint64_t scratch_bytes = 1000;
        constexpr std::size_t calls_with_scratch = 8;
        calls_in_flight calls(device, max_rows, 40, scratch_bytes);
        const stream stream(device);
        for (int round = 0; round < 3; ++round) {
            std::vector<taken_memory> taken = take_all(calls, stream, 10);
            std::vector<const std::byte*> scratch;
            for (taken_memory& each : taken) {
                if (each->scratch().empty()) continue;
                CHECK(each->scratch().size() >= scratch_bytes);
                CHECK(reinterpret_cast<std::uintptr_t>(each->scratch().data()) % 256 == 0);
                scratch.push_back(each->scratch().data());
            }
            CHECK(scratch.size() == calls_with_scratch);
            std::ranges::sort(scratch);
            CHECK(std::ranges::adjacent_find(scratch) == scratch.end());
            for (taken_memory& each : taken)
                calls.put_in_flight(each, stream);
            stream.synchronize();
        }
        calls_in_flight without(device, max_rows, 4);
        CHECK(without.take(stream, 1)[0]->scratch().empty());
    });
}
