#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "loader/slots.hpp"
#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"
#include "tests/fake_cuda_backend.hpp"

/// Pools of slots, and the pipeline's steps on the test's own thread.

inline std::shared_ptr<pinflow::detail::slot_pool> make_pool(const pinflow::device& device,
                                                             const pinflow::detail::slot_sizes& sizes) {
    const pinflow::stream allocation_stream(device);
    auto pool = std::make_shared<pinflow::detail::slot_pool>(
        sizes, std::vector<std::shared_ptr<const pinflow::row_source>>(),
        pinflow::detail::device_allocator{allocation_stream});
    allocation_stream.synchronize();
    return pool;
}

/// One slot that can be filled at once; null if there is none.
inline pinflow::detail::slot* take_one(pinflow::detail::slot_pool& pool) {
    const std::vector<pinflow::detail::slot*> taken = pool.take_free();
    return taken.empty() ? nullptr : taken.front();
}

/// Runs the pipeline's steps for a slot on this thread.
inline pinflow::detail::slot& fill(pinflow::detail::slot_pool& pool, const pinflow::stream& stream,
                                   std::uint64_t number, bool last = false) {
    REQUIRE(pool.wait_for_free() == 1);
    pinflow::detail::slot* const taken = take_one(pool);
    REQUIRE(taken != nullptr);
    taken->number = number;
    taken->last = last;
    taken->row_ids = {number};
    taken->scheduled = {.position = number, .row_count = 1, .begin = {0, number}, .end = {0, number + 1}};
    const auto mark = std::make_shared<pinflow::detail::data_mark>(stream.device());
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
