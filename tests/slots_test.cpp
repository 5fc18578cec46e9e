#include "loader/slots.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "loader/slot_lease.hpp"
#include "pinflow/error.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;
using detail::lease_when;
using detail::slot;
using detail::slot_lease;
using detail::slot_pool;

namespace {

std::shared_ptr<slot_pool> make_pool(const device& device, const detail::slot_sizes& sizes) {
    const stream allocation_stream(device);
    auto pool = std::make_shared<slot_pool>(sizes, std::vector<std::shared_ptr<const row_source>>(),
                                            detail::device_allocator{allocation_stream});
    allocation_stream.synchronize();
    return pool;
}

/// One slot that can be filled at once; null if there is none.
slot* take_one(slot_pool& pool) {
    const std::vector<slot*> taken = pool.take_free();
    return taken.empty() ? nullptr : taken.front();
}

/// Runs the pipeline's steps for a slot on this thread.
slot& fill(slot_pool& pool, const stream& stream, std::uint64_t number, bool last = false) {
    REQUIRE(pool.wait_for_free() == 1);
    slot* const taken = take_one(pool);
    REQUIRE(taken != nullptr);
    taken->number = number;
    taken->last = last;
    taken->row_ids = {number};
    taken->scheduled = {.position = number, .row_count = 1, .begin = {0, number}, .end = {0, number + 1}};
    const auto mark = std::make_shared<detail::data_mark>(stream.device());
    mark->record(stream);
    taken->data_mark = mark;
    pool.deliver({&taken, 1});
    return *taken;
}

/// From this size on, a lease waits for the data on a device that is not the host.
constexpr std::uint64_t large_slot_bytes = std::uint64_t{8} << 20;

/// A device that is not the host, and tells of the threads that wait for its events.
class awaited_backend final : public fake_cuda_backend {
 public:
    /// Before each wait, on the thread that waits.
    std::function<void()> before_wait = [] {};

    bool synchronize_event_for(void* event, std::chrono::microseconds timeout) override {
        before_wait();
        return fake_cuda_backend::synchronize_event_for(event, timeout);
    }
    void synchronize_event(void* event) override {
        before_wait();
        fake_cuda_backend::synchronize_event(event);
    }
};

}  // namespace

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
