#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "loader/slot_lease.hpp"
#include "loader/slots.hpp"
#include "pinflow/error.hpp"
#include "tests/slot_pools.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;
using detail::slot;
using detail::slot_lease;
using detail::slot_pool;
TEST_CASE("slots: are leased in the order in which they were delivered, and are reused") {
    on_each_device([](const device& device) {
        const auto pool = make_pool(device, {.count = 2, .host_side_bytes = 64, .device_side_bytes = 64});
        const stream copies(device);
        for (std::uint64_t number = 0; number < 10; number += 2) {
            fill(*pool, copies, number);
            fill(*pool, copies, number + 1);
            CHECK(take_one(*pool) == nullptr);
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
        const auto pool = make_pool(device, {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
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
        CHECK(take_one(*pool) == nullptr);
        first_gate.open();
        first.synchronize();
        CHECK(take_one(*pool) == nullptr);
        second_gate.open();
        second.synchronize();
        REQUIRE(pool->wait_for_free() == 1);
        CHECK(take_one(*pool) != nullptr);
    });
}

TEST_CASE("slots: a slot whose last use cannot be marked is lost, and its lease ends without waiting") {
    /// A device whose events cannot be recorded while it is `broken`.
    class broken_backend final : public fake_cuda_backend {
     public:
        bool broken = false;
        int waits = 0;

        void record_event(void* event, void* stream) override {
            if (broken) throw device_error("no event can be recorded");
            fake_cuda_backend::record_event(event, stream);
        }
        void synchronize_stream(void* stream) override {
            ++waits;
            fake_cuda_backend::synchronize_stream(stream);
        }
    };
    broken_backend backend;
    auto pool = make_pool(backend.device(), {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
    const stream copies(backend.device());
    const stream consumer(backend.device());
    fill(*pool, copies, 0);
    fill(*pool, copies, 1);
    const int waits_before = backend.waits;
    {
        slot_lease lease(pool, *pool->lease());
        lease.use_on(consumer);
        backend.broken = true;
    }
    backend.broken = false;
    CHECK(backend.waits == waits_before);
    {
        const slot_lease other(pool, *pool->lease());
        std::string message;
        try {
            pool->lease();
        } catch (const all_slots_leased& error) {
            message = error.what();
        }
        CHECK(message.find("1 of them lost") != std::string::npos);
        CHECK(pool->collected().lost_slots == 1);
    }
    fill(*pool, copies, 2);  // the other slot goes on
    CHECK(take_one(*pool) == nullptr);
    {
        const slot_lease last(pool, *pool->lease());
    }
    // the consumer may still read the lost slot, so the memory stays, and is no leak to LeakSanitizer
    const std::weak_ptr<slot_pool> watched = pool;
    pool.reset();
    CHECK(!watched.expired());
}

TEST_CASE("slots: a lease that ends while its stream is being captured loses the slot, not the loader") {
    fake_cuda_backend backend;
    const auto pool =
        make_pool(backend.device(), {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
    const stream copies(backend.device());
    const stream consumer(backend.device());
    fill(*pool, copies, 0);
    {
        slot_lease lease(pool, *pool->lease());
        lease.use_on(consumer);
        backend.captured = consumer.view().native_handle();
    }
    backend.captured = nullptr;
    fill(*pool, copies, 1);
    CHECK(take_one(*pool) == nullptr);
    {
        const slot_lease lease(pool, *pool->lease());
    }
    CHECK(pool.use_count() == 2);  // it keeps itself
}

TEST_CASE("slots: the pipeline waits for several slots together, unless the consumer has no batch left") {
    awaited_backend backend;
    const device device = backend.device();
    const auto pool = make_pool(device, {.count = 4, .host_side_bytes = 0, .device_side_bytes = 64});
    const stream copies(device);
    const stream consumer(device);
    gate using_second;
    unsigned waits = 0;
    backend.before_wait = [&] {
        ++waits;
        using_second.open();
    };
    for (std::uint64_t number = 0; number < 4; ++number)
        fill(*pool, copies, number);
    copies.synchronize();
    {
        const slot_lease first(pool, *pool->lease());
    }
    {
        slot_lease second(pool, *pool->lease());
        second.use_on(consumer);
        hold(consumer, using_second);
    }
    REQUIRE(pool->wait_for_free(1) == 1);
    CHECK(waits == 0);
    REQUIRE(pool->wait_for_free(2) == 2);  // only once the consumer's stream has passed the second
    CHECK(waits > 0);
    CHECK(pool->take_free(3).empty());
    const std::vector<slot*> both = pool->take_free(2);
    REQUIRE(both.size() == 2);
    CHECK(take_one(*pool) == nullptr);
    pool->deliver(both);
    const slot_lease third(pool, *pool->lease());
    const slot_lease fourth(pool, *pool->lease());
    const slot_lease fifth(pool, *pool->lease());
    {
        const slot_lease sixth(pool, *pool->lease());
    }
    CHECK(pool->wait_for_free(2) == 1);  // the others are the consumer's
    CHECK(take_one(*pool) != nullptr);
}

TEST_CASE("slots: a stuck stream does not delay a consumer that has no batch left") {
    awaited_backend backend;
    const auto pool =
        make_pool(backend.device(), {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
    const stream copies(backend.device());
    const stream consumer(backend.device());
    gate stuck;
    fill(*pool, copies, 0);
    fill(*pool, copies, 1);
    copies.synchronize();
    {
        const slot_lease passed(pool, *pool->lease());
    }
    {
        slot_lease used(pool, *pool->lease());
        used.use_on(consumer);
        hold(consumer, stuck);
    }
    CHECK(pool->wait_for_free(2) == 1);
    CHECK(take_one(*pool) != nullptr);
    stuck.open();
    consumer.synchronize();
}

TEST_CASE("slots: asking for a batch while every slot is leased is an error, except at the end") {
    const device device = device::host();
    const auto pool = make_pool(device, {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
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
    const auto pool = make_pool(device, {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
    const stream copies(device);
    fill(*pool, copies, 0);
    const slot_lease first(pool, *pool->lease());
    int refused = 0;
    std::vector<slot*> got(2);
    // two threads ask, one batch comes: the other thread must not wait for ever
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
    const auto pool = make_pool(device, {.count = 3, .host_side_bytes = 0, .device_side_bytes = 64});
    const stream copies(device);
    fill(*pool, copies, 0);
    slot* const broken = take_one(*pool);
    broken->error = std::make_exception_ptr(std::runtime_error("broken"));
    pool->deliver({&broken, 1});
    CHECK(pool->failed());
    fill(*pool, copies, 2);  // too late: nobody sees it
    {
        const slot_lease lease(pool, *pool->lease());
        CHECK(lease.leased_slot().number == 0);
    }
    CHECK_THROWS_WITH(pool->lease(), "broken");
    CHECK(pool->lease() == nullptr);
    CHECK(pool->lease() == nullptr);
}

TEST_CASE("slots: a lease that could not be used is repeated before later batches") {
    const device device = device::host();
    const auto pool = make_pool(device, {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
    const stream copies(device);
    fill(*pool, copies, 0);
    fill(*pool, copies, 1, true);
    {
        slot_lease refused(pool, *pool->lease());
        CHECK(refused.leased_slot().number == 0);
        refused.undo();
        CHECK(pool->collected().batches == 0);
        CHECK(pool->collected().rows == 0);
    }
    const slot_lease first(pool, *pool->lease());
    const slot_lease second(pool, *pool->lease());
    CHECK(first.leased_slot().number == 0);
    CHECK(second.leased_slot().number == 1);
    CHECK(pool->lease() == nullptr);
    CHECK(pool->collected().batches == 2);
}

TEST_CASE("slots: undoing a lease moves `reached` back to its batch, and leasing it again restores it") {
    const device device = device::host();
    const auto pool = make_pool(device, {.count = 3, .host_side_bytes = 0, .device_side_bytes = 64});
    const stream copies(device);
    const auto leased = [&](std::uint64_t number) {
        auto lease = std::make_unique<slot_lease>(pool, *pool->lease());
        CHECK(lease->leased_slot().number == number);
        return lease;
    };
    const auto reached = [&] { return pool->collected().reached.value().position; };
    CHECK_FALSE(pool->collected().reached.has_value());
    for (std::uint64_t number = 0; number < 3; ++number) {
        fill(*pool, copies, number, number == 2);
    }
    auto first = leased(0);
    auto second = leased(1);
    CHECK(reached() == 2);
    first->undo();
    CHECK(reached() == 0);
    first = leased(0);
    CHECK(reached() == 2);
    // in whatever order they are undone
    first->undo();
    second->undo();
    CHECK(reached() == 0);
    first = leased(0);
    CHECK(reached() == 1);
    second = leased(1);
    CHECK(reached() == 2);
    second->undo();
    CHECK(reached() == 1);
    second = leased(1);
    const auto third = leased(2);
    CHECK(reached() == 3);
    CHECK(pool->collected().batches == 3);
    CHECK(pool->collected().ready_sum == 3 + 2 + 1);  // when each was leased for the last time
    // if a batch is undone after `lease` has returned null, the delivery has not ended, and `wall` continues
    CHECK(pool->lease() == nullptr);
    CHECK(pool->collected().ended);
    third->undo();
    CHECK_FALSE(pool->collected().ended);
    const auto before = std::chrono::steady_clock::now();
    const std::chrono::nanoseconds wall = pool->collected().wall;
    while (std::chrono::steady_clock::now() == before) {
    }
    CHECK(pool->collected().wall > wall);
}

TEST_CASE("slots: stopping ends every wait") {
    const device device = device::host();
    const auto pool = make_pool(device, {.count = 2, .host_side_bytes = 0, .device_side_bytes = 64});
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
    std::thread driver([&] { CHECK(pool->wait_for_free() == 0); });  // held up by the consumer's stream
    std::thread taker([&] { CHECK(pool->lease() == nullptr); });
    pool->stop();
    driver.join();
    taker.join();
    CHECK(pool->wait_for_free() == 0);
    gate.open();
    consumer.synchronize();
}

TEST_CASE("slots: batches with arrived data are counted right while others are taken or repeated") {
    awaited_backend backend;
    const auto pool = make_pool(backend.device(),
                                {.count = 4, .host_side_bytes = 0, .device_side_bytes = large_slot_bytes});
    const std::array copies{stream(backend.device()), stream(backend.device())};
    gate copying;
    fill(*pool, copies[0], 0);
    copies[0].synchronize();
    hold(copies[1], copying);
    fill(*pool, copies[1], 1);
    fill(*pool, copies[0], 2);
    copies[0].synchronize();
    // the second is on its way, so that the third is not counted either
    auto first = std::make_unique<slot_lease>(pool, *pool->lease());
    CHECK(pool->collected().ready_sum == 1);
    first->undo();
    copying.open();
    copies[1].synchronize();
    first = std::make_unique<slot_lease>(pool, *pool->lease());
    CHECK(first->leased_slot().number == 0);
    CHECK(pool->collected().ready_sum == 3);
    const slot_lease second(pool, *pool->lease());
    CHECK(pool->collected().ready_sum == 3 + 2);
    fill(*pool, copies[0], 3, true);
    copies[0].synchronize();
    const slot_lease third(pool, *pool->lease());
    CHECK(third.leased_slot().number == 2);
    CHECK(pool->collected().ready_sum == 3 + 2 + 2);
}
