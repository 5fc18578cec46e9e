#include "src/rows/staging.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <vector>

#include "pinflow/rows.hpp"
#include "src/rows/exchange_state.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;
using detail::exchange_state;
using detail::staging_ring;
using detail::staging_rings;

TEST_CASE("staging: buffers come round, with memory of their own on both sides") {
    on_each_device([](const device& device) {
        staging_ring ring(device, 1000, 3);
        CHECK(ring.buffer_bytes() == 1000);
        std::vector<staging_ring::buffer*> buffers;
        for (int i = 0; i < 7; ++i)
            buffers.push_back(&ring.next());
        CHECK(buffers[0] == buffers[3]);
        CHECK(buffers[1] == buffers[4]);
        CHECK(buffers[2] == buffers[5]);
        CHECK(buffers[0] == buffers[6]);
        CHECK(buffers[0] != buffers[1]);
        CHECK(buffers[1] != buffers[2]);
        for (const staging_ring::buffer* const buffer : {buffers[0], buffers[1], buffers[2]}) {
            CHECK(buffer->host.size_bytes() >= 1000);
            CHECK(buffer->on_device.size_bytes() >= 1000);
            CHECK(buffer->free.done());
            CHECK(buffer->filled.done());
        }
    });
}

TEST_CASE("staging: neighbouring buffers are worked on at the same time") {
    on_each_device([](const device& device) {
        staging_ring ring(device, 64, 4);
        gate first;
        std::atomic<int> done = 0;
        event second_done(device);
        staging_ring::buffer& one = ring.next();
        staging_ring::buffer& other = ring.next();
        hold(one.cpu, first);
        one.cpu.host_function_async([&] { ++done; });
        other.cpu.host_function_async([&] { ++done; });
        second_done.record(other.cpu);
        CHECK(second_done.synchronize_for(std::chrono::seconds(20)));
        CHECK(done == 1);
        CHECK_FALSE(ring.done());
        first.open();
        one.cpu.synchronize();
        other.cpu.synchronize();
        ring.copies().synchronize();  // the constructor has enqueued the clearing of buffers
        CHECK(done == 2);
        CHECK(ring.done());
    });
}

TEST_CASE("staging: all streams begin behind the user's, which continues behind all of them") {
    on_each_device([](const device& device) {
        staging_ring ring(device, 64, 2);
        const stream user(device);
        const std::array<stream_view, 3> streams{ring.next().cpu, ring.next().cpu, ring.copies()};
        std::atomic<int> before = 0;
        std::atomic<int> begun = 0;
        std::atomic<int> ended = 0;
        int ended_before = 0;  // `ended` when the user's stream continued
        gate first;
        gate last;
        hold(user, first);
        user.host_function_async([&] { before = 1; });
        ring.begin_after(user);
        for (const stream_view each : streams) {
            each.host_function_async([&] { begun += before.load(); });
            hold(each, last);
            each.host_function_async([&] { ++ended; });
        }
        ring.end_before(user);
        user.host_function_async([&] { ended_before = ended; });
        CHECK_FALSE(ring.done());
        CHECK(begun == 0);
        first.open();
        last.open();
        user.synchronize();
        CHECK(begun == 3);
        CHECK(ended_before == 3);
        for (const stream_view each : streams)
            each.synchronize();
        CHECK(ring.done());
    });
}

TEST_CASE("staging: its destructor waits for enqueued work") {
    on_each_device([](const device& device) {
        const stream user(device);
        std::atomic<bool> done = false;
        gate gate;
        {
            staging_ring ring(device, 64, 2);
            staging_ring::buffer& buffer = ring.next();
            hold(user, gate);
            ring.begin_after(user);
            buffer.cpu.host_function_async([&, to = buffer.host.data()] {
                std::memset(to, 1, 64);
                done = true;
            });
            buffer.filled.record(buffer.cpu);
            ring.copies().wait(buffer.filled);
            copy_to_device_async(buffer.on_device.data(), buffer.host.bytes(), ring.copies());
            gate.open();
        }
        CHECK(done);
    });
}

TEST_CASE("staging: a ring goes to the stream that used it last, and to another stream once it is idle") {
    on_each_device([](const device& device) {
        const stream first(device);
        const stream second(device);
        const stream third(device);
        staging_rings rings;
        CHECK_FALSE(rings.has_some());
        rings.reserve(device, 64, 2, nullptr);
        rings.reserve(device, 64, 2, nullptr);  // does nothing: there are rings
        CHECK(rings.has_some());
        gate gate;
        hold(first, gate);
        const auto take = [&](const stream& stream) {
            const staging_rings::taken_ring taken = rings.take(stream);
            taken->begin_after(stream);
            return &*taken;
        };
        const staging_ring* const of_first = take(first);
        const staging_ring* const of_second = take(second);
        CHECK(of_second != of_first);
        CHECK(take(first) == of_first);
        CHECK(take(second) == of_second);
        second.synchronize();
        CHECK(take(third) == of_second);
        std::atomic<bool> opened = false;
        third.host_function_async([&] {
            opened = true;
            gate.open();
        });
        CHECK(take(third) == of_second);
        const auto waiting = std::async(std::launch::async, [&] { return take(second); });
        waiting.wait();
        CHECK(opened);
    });
}

TEST_CASE("staging: an exchange stays within its memory limit, unless two rows exceed the limit") {
    on_each_device([](const device& device) {
        std::vector<std::byte> memory(1 << 16);
        const auto buffer_bytes = [&](std::uint64_t row_bytes, std::uint64_t staging_bytes) {
            const exchange_state state(row_table(memory, row_bytes), device,
                                       {.route = row_route::staged, .staging_bytes = staging_bytes});
            return state.staging_buffer_bytes();
        };
        CHECK(buffer_bytes(512, 64 << 20) == 8 << 20);
        CHECK(buffer_bytes(512, 1 << 20) == 512 << 10);
        CHECK(buffer_bytes(512, 3000) == 1024);
        CHECK(buffer_bytes(512, 0) == 512);
        CHECK(buffer_bytes(1 << 16, 1000) == 1 << 16);
        CHECK(buffer_bytes(1 << 12, 20'000) == 2 << 12);
    });
}
