#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <mutex>
#include <numeric>
#include <semaphore>
#include <thread>
#include <vector>

#include "loader/slot_lease.hpp"
#include "loader/slots.hpp"
#include "pinflow/error.hpp"
#include "tests/slot_pools.hpp"
#include "tests/support/devices.hpp"

// Consumers that wait for the data of slots.

using namespace pinflow;
using detail::lease_when;
using detail::slot;
using detail::slot_lease;
using detail::slot_pool;
TEST_CASE("slots: the consumer's stream waits until the data is there") {
    on_each_device([](const device& device) {
        const auto pool = make_pool(device, {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
        const stream copies(device);
        const stream consumer(device);
        gate copying;
        hold(copies, copying);
        fill(*pool, copies, 0);
        bool read = false;
        {
            slot_lease lease(pool, *pool->lease());
            lease.use_on(consumer);
            consumer.host_function_async([&] { read = true; });
            CHECK_FALSE(consumer.done());
        }
        copying.open();
        consumer.synchronize();
        CHECK(read);
    });
}

TEST_CASE("slots: a lease can wait for the slot's data, and the wait counts as link, not as consumer") {
    // what a consumer and the thread that fills slots waited for, if the data takes `length` to arrive
    const auto waited = [](const device& device, lease_when when, std::chrono::milliseconds length) {
        const auto pool =
            make_pool(device, {.count = 2,
                               .host_side_bytes = 0,
                               .device_side_bytes = when == lease_when::complete ? 64 : large_slot_bytes});
        const stream copies(device);
        gate copying;
        std::atomic<bool> copied = false;
        hold(copies, copying);
        copies.host_function_async([&] { copied = true; });
        fill(*pool, copies, 0);
        fill(*pool, copies, 1);
        std::atomic<int> waiting = 0;
        std::thread consumer([&] {
            ++waiting;
            slot* const leased = pool->lease(when);
            CHECK(copied);
            if (leased != nullptr) pool->end_lease(*leased);
        });
        std::thread driver([&] {
            ++waiting;
            CHECK(pool->wait_for_free() == 1);  // nothing is left to fill before the data is there
        });
        while (waiting < 2)
            std::this_thread::yield();
        std::this_thread::sleep_for(length);
        copying.open();
        consumer.join();
        driver.join();
        return pool->collected();
    };
    const auto check = [&](const device& device, lease_when when) {
        bool is_the_links = false;
        for (const int milliseconds : {50, 200, 800}) {  // longer, if other work holds the threads up
            const slot_pool::statistics collected =
                waited(device, when, std::chrono::milliseconds(milliseconds));
            CHECK(collected.waits.link + collected.consumer_wait <= collected.wall);
            is_the_links = collected.waits.link > 2 * collected.consumer_wait;
            if (is_the_links) break;
        }
        CHECK(is_the_links);
    };
    on_each_device([&](const device& device) { check(device, lease_when::complete); });
    fake_cuda_backend backend;
    check(backend.device(), lease_when::delivered);  // a large one comes with its data in any case
}

TEST_CASE("slots: on a GPU, a slot of a group of 8 MiB or more is leased only once its data is there") {
    awaited_backend backend;
    unsigned waits = 0;
    // whether the data was there once the slot was leased; checks that `lease` waited in this case only
    const auto leased_with_data = [&](const device& device, std::uint64_t slot_bytes,
                                      unsigned max_group_slots = 1) {
        const auto pool = make_pool(device, {.count = 2,
                                             .host_side_bytes = 0,
                                             .device_side_bytes = slot_bytes,
                                             .max_group_slots = max_group_slots});
        const stream copies(device);
        gate copying;
        waits = 0;
        backend.before_wait = [&] {
            ++waits;
            copying.open();
        };
        hold(copies, copying);
        fill(*pool, copies, 0);
        const slot_lease lease(pool, *pool->lease());
        const bool with_data = lease.leased_slot().data_mark->done();
        CHECK(with_data == (waits > 0));
        copying.open();
        copies.synchronize();
        return with_data;
    };
    CHECK(leased_with_data(backend.device(), large_slot_bytes));
    CHECK_FALSE(leased_with_data(backend.device(), large_slot_bytes - 1));
    CHECK_FALSE(leased_with_data(device::host(), large_slot_bytes));
    CHECK(leased_with_data(backend.device(), large_slot_bytes / 4, 4));
    CHECK_FALSE(leased_with_data(backend.device(), large_slot_bytes / 4, 3));
    CHECK_FALSE(leased_with_data(device::host(), large_slot_bytes / 4, 4));
}

TEST_CASE("slots: several consumers get every batch, once and with its data") {
    constexpr std::uint64_t batch_count = 300;
    awaited_backend backend;
    const auto pool = make_pool(backend.device(),
                                {.count = 4, .host_side_bytes = 0, .device_side_bytes = large_slot_bytes});
    // each copy continues when somebody waits for a batch
    std::counting_semaphore<> waits{0};
    backend.before_wait = [&] { waits.release(); };
    const stream copies(backend.device());
    std::mutex mutex;
    std::vector<std::uint64_t> got;
    std::vector<std::thread> consumers;
    for (int i = 0; i < 3; ++i) {
        consumers.emplace_back([&] {
            while (slot* const leased = pool->lease()) {
                const slot_lease lease(pool, *leased);
                CHECK(leased->data_mark->done());
                const std::lock_guard lock(mutex);
                got.push_back(leased->number);
            }
        });
    }
    for (std::uint64_t number = 0; number < batch_count; ++number) {
        copies.host_function_async([&] { waits.acquire(); });
        fill(*pool, copies, number, number + 1 == batch_count);
    }
    for (std::thread& consumer : consumers) {
        consumer.join();
    }
    waits.release(batch_count);  // lets the copies end if no consumer has waited
    std::ranges::sort(got);
    std::vector<std::uint64_t> all(batch_count);
    std::iota(all.begin(), all.end(), std::uint64_t{0});
    CHECK(got == all);
    CHECK(pool->collected().batches == batch_count);
}

TEST_CASE("slots: a batch whose data cannot be waited for comes the next time") {
    awaited_backend backend;
    const auto pool = make_pool(backend.device(),
                                {.count = 2, .host_side_bytes = 0, .device_side_bytes = large_slot_bytes});
    const stream copies(backend.device());
    gate copying;
    hold(copies, copying);
    fill(*pool, copies, 0);
    fill(*pool, copies, 1);
    backend.before_wait = [] { throw device_error("the device is broken"); };
    CHECK_THROWS_WITH_AS(pool->lease(), "the device is broken", device_error);
    CHECK(pool->collected().batches == 0);
    CHECK(pool->collected().waits.link.count() == 0);
    backend.before_wait = [&] { copying.open(); };
    const slot_lease lease(pool, *pool->lease());
    CHECK(lease.leased_slot().number == 0);
    CHECK(lease.leased_slot().data_mark->done());
    CHECK(pool->collected().batches == 1);
    copying.open();
    copies.synchronize();
}

TEST_CASE(
    "slots: a thread waiting for data notices that another consumer took it and the slot was refilled") {
    awaited_backend backend;
    const auto pool = make_pool(backend.device(),
                                {.count = 2, .host_side_bytes = 0, .device_side_bytes = large_slot_bytes});
    const stream copies(backend.device());
    const stream blocked_copies(backend.device());
    gate first_copying;
    gate third_copying;
    gate waiting;
    gate go_on;
    hold(blocked_copies, first_copying);
    fill(*pool, blocked_copies, 0);
    fill(*pool, copies, 1);
    backend.before_wait = [&] {
        waiting.open();
        go_on.wait();
    };
    std::future<slot*> slow = std::async(std::launch::async, [&] {
        slot* const leased = pool->lease();
        waiting.open();  // in case `lease` did not wait
        return leased;
    });
    waiting.wait();
    first_copying.open();
    blocked_copies.synchronize();
    slot* const taken = pool->lease();
    REQUIRE(taken != nullptr);
    CHECK(taken->number == 0);
    pool->end_lease(*taken);
    hold(blocked_copies, third_copying);
    CHECK(&fill(*pool, blocked_copies, 2) == taken);
    go_on.open();
    // batch 1 has long been there
    CHECK(slow.wait_for(std::chrono::seconds(10)) == std::future_status::ready);
    third_copying.open();
    const slot_lease lease(pool, *slow.get());
    CHECK(lease.leased_slot().number == 1);
    blocked_copies.synchronize();
}
