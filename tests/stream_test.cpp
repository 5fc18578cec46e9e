#include "pinflow/stream.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;

TEST_CASE("stream: runs work in the order in which it was enqueued, on another thread") {
    on_each_device([](const device& device) {
        const stream stream(device);
        std::vector<int> order;
        std::thread::id runner;
        for (int i = 0; i < 100; ++i) {
            stream.host_function_async([&, i] { order.push_back(i); });
        }
        stream.host_function_async([&] { runner = std::this_thread::get_id(); });
        stream.synchronize();
        REQUIRE(order.size() == 100);
        CHECK(std::is_sorted(order.begin(), order.end()));
        CHECK(runner != std::this_thread::get_id());
    });
}

TEST_CASE("stream: enqueuing does not wait, synchronising does") {
    on_each_device([](const device& device) {
        const stream stream(device);
        std::atomic<bool> ran = false;
        gate gate;
        hold(stream, gate);
        stream.host_function_async([&] { ran = true; });
        CHECK_FALSE(stream.done());
        CHECK_FALSE(ran);
        gate.open();
        stream.synchronize();
        CHECK(ran);
        CHECK(stream.done());
    });
}

TEST_CASE("stream: two streams run independently, and in order if one waits for the other's event") {
    on_each_device([](const device& device) {
        const stream first(device);
        const stream second(device);
        event written(device);
        std::atomic<int> value = 0;
        int seen_without = -1;
        int seen_with = -1;
        gate gate;
        hold(first, gate);
        first.host_function_async([&] { value = 1; });
        written.record(first);
        second.host_function_async([&] { seen_without = value; });
        second.synchronize();  // does not depend on the gate
        CHECK(seen_without == 0);
        second.wait(written);
        second.host_function_async([&] { seen_with = value; });
        CHECK_FALSE(second.done());
        gate.open();
        second.synchronize();
        CHECK(seen_with == 1);
        first.synchronize();
    });
}

TEST_CASE("event: is done before it is recorded, and after its stream has passed it") {
    on_each_device([](const device& device) {
        const stream stream(device);
        event mark(device);
        CHECK(mark.done());
        CHECK(mark.synchronize_for(std::chrono::microseconds(1)));
        gate gate;
        hold(stream, gate);
        mark.record(stream);
        CHECK_FALSE(mark.done());
        CHECK_FALSE(mark.synchronize_for(std::chrono::microseconds(200)));
        gate.open();
        mark.synchronize();
        CHECK(mark.done());
        CHECK(mark.synchronize_for(std::chrono::microseconds(0)));
    });
}

TEST_CASE("event: a wait of the longest time ends when the event is reached") {
    on_each_device([](const device& device) {
        const stream stream(device);
        event mark(device);
        gate gate;
        hold(stream, gate);
        mark.record(stream);
        std::thread opener([&] { gate.open(); });
        CHECK(mark.synchronize_for(std::chrono::microseconds::max()));
        opener.join();
    });
}

TEST_CASE("stream: an empty function is refused") {
    on_each_device([](const device& device) {
        const stream stream(device);
        CHECK_THROWS_AS(stream.host_function_async(nullptr), pinflow::invalid_argument);
        stream.synchronize();
    });
}

TEST_CASE("event: a wait means the record made before it, not a later one") {
    on_each_device([](const device& device) {
        const stream recorder(device);
        const stream waiter(device);
        event mark(device);
        mark.record(recorder);
        recorder.synchronize();
        waiter.wait(mark);
        gate gate;
        hold(recorder, gate);
        mark.record(recorder);  // blocked: the waiter must not wait for this one
        waiter.synchronize();
        CHECK_FALSE(mark.done());
        gate.open();
        recorder.synchronize();
    });
}

TEST_CASE("event: a wait for its record on one stream stays, even if it is then recorded on another stream") {
    on_each_device([](const device& device) {
        const stream first(device);
        const stream second(device);
        const stream waiter(device);
        event mark(device);
        gate gate;
        hold(first, gate);
        mark.record(first);
        waiter.wait(mark);
        mark.record(second);
        second.synchronize();
        CHECK(mark.done());
        CHECK_FALSE(waiter.done());  // it waits for the record that was the last one then
        gate.open();
        waiter.synchronize();
    });
}

TEST_CASE("event: may be destroyed before its stream has reached the record") {
    on_each_device([](const device& device) {
        const stream recorder(device);
        const stream waiter(device);
        std::atomic<bool> ran = false;
        gate gate;
        hold(recorder, gate);
        {
            event mark(device);
            mark.record(recorder);
            waiter.wait(mark);
        }
        waiter.host_function_async([&] { ran = true; });
        CHECK_FALSE(waiter.done());
        gate.open();
        waiter.synchronize();
        CHECK(ran);
        recorder.synchronize();
    });
}

TEST_CASE("stream: its destructor waits for what is enqueued") {
    on_each_device([](const device& device) {
        std::atomic<int> ran = 0;
        {
            const stream stream(device);
            for (int i = 0; i < 10; ++i) {
                stream.host_function_async([&] { ++ran; });
            }
        }
        CHECK(ran == 10);
    });
}

TEST_CASE("stream: moves leave one owner") {
    on_each_device([](const device& device) {
        stream first(device);
        std::atomic<int> ran = 0;
        first.host_function_async([&] { ++ran; });
        stream second(std::move(first));
        second.host_function_async([&] { ++ran; });
        stream third(device);
        third = std::move(second);
        third.synchronize();
        CHECK(ran == 2);
    });
}

TEST_CASE("stream: work may be enqueued from several threads") {
    on_each_device([](const device& device) {
        const stream stream(device);
        int sum = 0;  // not atomic: the stream runs one piece of work at a time
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; ++t) {
            threads.emplace_back([&] {
                for (int i = 0; i < 250; ++i) {
                    stream.host_function_async([&] { ++sum; });
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        stream.synchronize();
        CHECK(sum == 1000);
    });
}

TEST_CASE("stream: events and streams of different devices are refused together") {
    if (device::cuda_count() == 0) {
        MESSAGE("skipped: there is no second device");
        return;
    }
    const stream host(device::host());
    event cuda_mark(device::cuda(0));
    CHECK_THROWS_AS(cuda_mark.record(host), invalid_argument);
    CHECK_THROWS_AS(host.wait(cuda_mark), invalid_argument);
}
