#include "src/rows/staging.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "pinflow/rows.hpp"
#include "src/rows/exchange_state.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;
using detail::exchange_state;
using detail::staging;

TEST_CASE("staging: slots come round, with memory of their own on both sides") {
    on_each_device([](const device& device) {
        staging lane(device, 1000, 3);
        CHECK(lane.slot_bytes() == 1000);
        std::vector<staging::slot*> slots;
        for (int i = 0; i < 7; ++i)
            slots.push_back(&lane.next());
        CHECK(slots[0] == slots[3]);
        CHECK(slots[1] == slots[4]);
        CHECK(slots[2] == slots[5]);
        CHECK(slots[0] == slots[6]);
        CHECK(slots[0] != slots[1]);
        CHECK(slots[1] != slots[2]);
        for (const staging::slot* const slot : {slots[0], slots[1], slots[2]}) {
            CHECK(slot->host.size_bytes() >= 1000);
            CHECK(slot->on_device.size_bytes() >= 1000);
            CHECK(slot->free.done());
            CHECK(slot->filled.done());
        }
    });
}

TEST_CASE("staging: neighbouring slots are worked on at the same time") {
    on_each_device([](const device& device) {
        staging lane(device, 64, 4);
        gate first;
        std::atomic<int> done = 0;
        event second_done(device);
        staging::slot& one = lane.next();
        staging::slot& other = lane.next();
        hold(one.cpu, first);
        one.cpu.host_function_async([&] { ++done; });
        other.cpu.host_function_async([&] { ++done; });
        second_done.record(other.cpu);
        CHECK(second_done.synchronize_for(std::chrono::seconds(20)));
        CHECK(done == 1);
        CHECK_FALSE(lane.done());
        first.open();
        one.cpu.synchronize();
        other.cpu.synchronize();
        lane.copies().synchronize();  // slots are cleared at first
        CHECK(done == 2);
        CHECK(lane.done());
    });
}

TEST_CASE("staging: all streams begin behind the user's, which goes on behind all of them") {
    on_each_device([](const device& device) {
        staging lane(device, 64, 2);
        const stream user(device);
        const std::array<stream_view, 3> streams{lane.next().cpu, lane.next().cpu, lane.copies()};
        std::atomic<int> before = 0;
        std::atomic<int> begun = 0;
        std::atomic<int> ended = 0;
        int ended_before = 0;  // the user's stream went on
        gate first;
        gate last;
        hold(user, first);
        user.host_function_async([&] { before = 1; });
        lane.begin_after(user);
        for (const stream_view each : streams) {
            each.host_function_async([&] { begun += before.load(); });
            hold(each, last);
            each.host_function_async([&] { ++ended; });
        }
        lane.end_before(user);
        user.host_function_async([&] { ended_before = ended; });
        CHECK_FALSE(lane.done());
        CHECK(begun == 0);
        first.open();
        last.open();
        user.synchronize();
        CHECK(begun == 3);
        CHECK(ended_before == 3);
        for (const stream_view each : streams)
            each.synchronize();
        CHECK(lane.done());
    });
}

TEST_CASE("staging: its destructor waits for what it was given to do") {
    on_each_device([](const device& device) {
        const stream user(device);
        std::atomic<bool> done = false;
        gate gate;
        {
            staging lane(device, 64, 2);
            staging::slot& slot = lane.next();
            hold(user, gate);
            lane.begin_after(user);
            slot.cpu.host_function_async([&, to = slot.host.data()] {
                std::memset(to, 1, 64);
                done = true;
            });
            slot.filled.record(slot.cpu);
            lane.copies().wait(slot.filled);
            copy_to_device_async(slot.on_device.data(), slot.host.bytes(), lane.copies());
            gate.open();
        }
        CHECK(done);
    });
}

TEST_CASE("staging: an exchange keeps to the memory that it may take, as far as two rows allow") {
    on_each_device([](const device& device) {
        std::vector<std::byte> memory(1 << 16);
        const auto slot_bytes = [&](std::uint64_t row_bytes, std::uint64_t staging_bytes) {
            const exchange_state state(row_table(memory, row_bytes), device,
                                       {.route = row_route::staged, .staging_bytes = staging_bytes});
            return state.staging_slot_bytes();
        };
        CHECK(slot_bytes(512, 64 << 20) == 8 << 20);
        CHECK(slot_bytes(512, 1 << 20) == 512 << 10);
        CHECK(slot_bytes(512, 3000) == 1024);
        CHECK(slot_bytes(512, 0) == 512);
        CHECK(slot_bytes(1 << 16, 1000) == 1 << 16);
        CHECK(slot_bytes(1 << 12, 20'000) == 2 << 12);
    });
}
