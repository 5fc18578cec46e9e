#include "loader/slots.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include "pinflow/error.hpp"
#include "tests/devices.hpp"

using namespace pinflow;
using detail::slot;
using detail::slot_lease;
using detail::slot_pool;

namespace {

/// What the pipeline does with a slot, on this thread.
slot& fill(slot_pool& pool, const stream& stream, std::uint64_t number, bool last = false) {
    REQUIRE(pool.wait_for_free());
    slot* const taken = pool.take_free();
    REQUIRE(taken != nullptr);
    taken->number = number;
    taken->last = last;
    taken->row_ids = {number};
    taken->ready.record(stream);
    pool.deliver(*taken);
    return *taken;
}

}  // namespace

TEST_CASE("slots: come out in the order in which they were delivered, and go round") {
    on_each_device([](const device& device) {
        const auto pool =
            std::make_shared<slot_pool>(device, 2, 64, 64, std::vector<std::shared_ptr<const row_source>>());
        const stream copies(device);
        for (std::uint64_t number = 0; number < 10; number += 2) {
            fill(*pool, copies, number);
            fill(*pool, copies, number + 1);
            CHECK(pool->take_free() == nullptr);
            for (const std::uint64_t expected : {number, number + 1}) {
                slot* const leased = pool->lease();
                REQUIRE(leased != nullptr);
                CHECK(leased->number == expected);
                const slot_lease lease(pool, *leased);
            }
        }
        CHECK(pool->collected().batches == 10);
        CHECK(pool->collected().rows == 10);
    });
}

TEST_CASE("slots: a slot is not free before the consumer's streams have passed its lease") {
    on_each_device([](const device& device) {
        const auto pool =
            std::make_shared<slot_pool>(device, 2, 0, 64, std::vector<std::shared_ptr<const row_source>>());
        const stream copies(device);
        const stream first(device);
        const stream second(device);
        gate first_gate;
        gate second_gate;
        fill(*pool, copies, 0);
        {
            slot_lease lease(pool, *pool->lease());
            lease.use_on(first);
            lease.use_on(second);
            lease.use_on(first);  // once is enough
            hold(first, first_gate);
            hold(second, second_gate);
        }
        fill(*pool, copies, 1);  // the other one
        CHECK(pool->take_free() == nullptr);
        first_gate.open();
        first.synchronize();
        CHECK(pool->take_free() == nullptr);
        second_gate.open();
        second.synchronize();
        REQUIRE(pool->wait_for_free());
        CHECK(pool->take_free() != nullptr);
    });
}

TEST_CASE("slots: the consumer's stream waits until the data is there") {
    on_each_device([](const device& device) {
        const auto pool =
            std::make_shared<slot_pool>(device, 2, 0, 64, std::vector<std::shared_ptr<const row_source>>());
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

TEST_CASE("slots: a slot can be asked for with its data, and the time is the link's, not the consumer's") {
    // what a consumer and a driver have waited when the data took so long
    const auto waited = [](const device& device, std::chrono::milliseconds length) {
        const auto pool =
            std::make_shared<slot_pool>(device, 2, 0, 64, std::vector<std::shared_ptr<const row_source>>());
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
            slot* const leased = pool->lease(true);
            CHECK(copied);
            if (leased != nullptr) pool->end_lease(*leased);
        });
        std::thread driver([&] {
            ++waiting;
            CHECK(pool->wait_for_free());  // nothing is left to fill before the data is there
        });
        while (waiting < 2)
            std::this_thread::yield();
        std::this_thread::sleep_for(length);
        copying.open();
        consumer.join();
        driver.join();
        return pool->collected();
    };
    on_each_device([&](const device& device) {
        bool is_the_links = false;
        for (const int milliseconds : {50, 200, 800}) {  // longer, where other work holds the threads up
            const slot_pool::statistics collected = waited(device, std::chrono::milliseconds(milliseconds));
            CHECK(collected.waits.link + collected.consumer_wait <= collected.wall);
            is_the_links = collected.waits.link > 2 * collected.consumer_wait;
            if (is_the_links) break;
        }
        CHECK(is_the_links);
    });
}

TEST_CASE("slots: asking for a batch while holding every slot is an error, except at the end") {
    const device device = device::host();
    const auto pool =
        std::make_shared<slot_pool>(device, 2, 0, 64, std::vector<std::shared_ptr<const row_source>>());
    const stream copies(device);
    fill(*pool, copies, 0);
    fill(*pool, copies, 1);
    std::optional<slot_lease> first(std::in_place, pool, *pool->lease());
    const slot_lease second(pool, *pool->lease());
    CHECK_THROWS_AS(pool->lease(), all_slots_leased);
    first.reset();
    fill(*pool, copies, 2, true);
    const slot_lease third(pool, *pool->lease());
    CHECK(pool->lease() == nullptr);
}

TEST_CASE("slots: taking the last slot ends another thread's hopeless wait") {
    const device device = device::host();
    const auto pool =
        std::make_shared<slot_pool>(device, 2, 0, 64, std::vector<std::shared_ptr<const row_source>>());
    const stream copies(device);
    fill(*pool, copies, 0);
    const slot_lease first(pool, *pool->lease());
    int refused = 0;
    std::vector<slot*> got(2);
    // two threads ask, one batch comes: whoever does not get it must not wait for ever
    std::mutex mutex;
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&, i] {
            try {
                slot* const leased = pool->lease();
                const std::lock_guard lock(mutex);
                got[static_cast<std::size_t>(i)] = leased;
            } catch (const all_slots_leased&) {
                const std::lock_guard lock(mutex);
                ++refused;
            }
        });
    }
    fill(*pool, copies, 1);
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(refused == 1);
    for (slot* const leased : got) {
        if (leased != nullptr) pool->end_lease(*leased);
    }
}

TEST_CASE("slots: an error comes after the batches before it, once, and ends everything") {
    const device device = device::host();
    const auto pool =
        std::make_shared<slot_pool>(device, 3, 0, 64, std::vector<std::shared_ptr<const row_source>>());
    const stream copies(device);
    fill(*pool, copies, 0);
    slot* const broken = pool->take_free();
    broken->error = std::make_exception_ptr(std::runtime_error("broken"));
    pool->deliver(*broken);
    CHECK(pool->failed());
    fill(*pool, copies, 2);  // too late: nobody sees it
    {
        const slot_lease lease(pool, *pool->lease());
        CHECK(lease.held().number == 0);
    }
    CHECK_THROWS_WITH(pool->lease(), "broken");
    CHECK(pool->lease() == nullptr);
    CHECK(pool->lease() == nullptr);
}

TEST_CASE("slots: a lease that could not be used comes again, before what follows it") {
    const device device = device::host();
    const auto pool =
        std::make_shared<slot_pool>(device, 2, 0, 64, std::vector<std::shared_ptr<const row_source>>());
    const stream copies(device);
    fill(*pool, copies, 0);
    fill(*pool, copies, 1, true);
    {
        slot_lease refused(pool, *pool->lease());
        CHECK(refused.held().number == 0);
        refused.undo();
        CHECK(pool->collected().batches == 0);
        CHECK(pool->collected().rows == 0);
    }
    const slot_lease first(pool, *pool->lease());
    const slot_lease second(pool, *pool->lease());
    CHECK(first.held().number == 0);
    CHECK(second.held().number == 1);
    CHECK(pool->lease() == nullptr);
    CHECK(pool->collected().batches == 2);
}

TEST_CASE("slots: stopping ends every wait") {
    const device device = device::host();
    const auto pool =
        std::make_shared<slot_pool>(device, 2, 0, 64, std::vector<std::shared_ptr<const row_source>>());
    const stream copies(device);
    const stream consumer(device);
    gate gate;
    fill(*pool, copies, 0);
    fill(*pool, copies, 1);
    for (int i = 0; i < 2; ++i) {
        slot_lease lease(pool, *pool->lease());
        lease.use_on(consumer);
        hold(consumer, gate);
    }
    std::thread driver([&] { CHECK_FALSE(pool->wait_for_free()); });  // held up by the consumer's stream
    std::thread taker([&] { CHECK(pool->lease() == nullptr); });
    pool->stop();
    driver.join();
    taker.join();
    CHECK_FALSE(pool->wait_for_free());
    gate.open();
}
