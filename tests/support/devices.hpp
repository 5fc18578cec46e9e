#pragma once

#include <doctest/doctest.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"

/// A pin budget above what any test registers. With it, all of the memory left may be registered. By default,
/// three quarters may.
inline constexpr std::uint64_t generous_pin_budget = std::uint64_t{64} << 30;

/// Runs `body(device)` on the host, and on the first CUDA device if there is one.
template <typename Body>
void on_each_device(Body body) {
    std::vector<pinflow::device> devices{pinflow::device::host()};
    if (pinflow::device::cuda_count() > 0) devices.push_back(pinflow::device::cuda(0));
    for (const pinflow::device& device : devices) {
        INFO("on " << device.name());
        body(device);
    }
}

/// Blocks waiting threads until it is opened. The destructor opens it, so that a failed test does not hang.
class gate {
 public:
    gate() = default;
    gate(const gate&) = delete;
    gate& operator=(const gate&) = delete;
    ~gate() { open(); }

    void open() const {
        const std::shared_ptr<state> kept = state_;  // a released thread may destroy the gate
        {
            const std::lock_guard lock(kept->mutex);
            kept->open = true;
        }
        kept->opened.notify_all();
    }
    void wait() const { state_->wait(); }
    /// A function that waits, and may be called after the gate has been destroyed.
    auto waiter() const {
        return [state = state_] { state->wait(); };
    }

 private:
    struct state {
        void wait() {
            std::unique_lock lock(mutex);
            opened.wait(lock, [&] { return open; });
        }
        std::mutex mutex;
        std::condition_variable opened;
        bool open = false;
    };
    /// Shared, because a thread that was released may still be leaving `wait` when the gate is destroyed.
    std::shared_ptr<state> state_ = std::make_shared<state>();
};

/// Marks tests that compute-sanitizer cannot run: they block one stream and wait for another. Under the tool,
/// waiting for one stream waits for all.
inline const auto blocks_a_stream = doctest::test_suite("blocked stream");

/// Marks tests that only initcheck cannot run: there, enqueuing a copy behind a blocked stream blocks the
/// caller.
inline const auto blocks_copies = doctest::test_suite("copies behind a blocked stream");

/// Everything enqueued on `stream` after this starts when `gate` opens.
inline void hold(pinflow::stream_view stream, const gate& gate) {
    stream.host_function_async(gate.waiter());
}

/// Copies device memory to the host in `stream`'s order.
inline std::vector<std::byte> to_host(const std::byte* data, std::size_t size_bytes,
                                      pinflow::stream_view stream) {
    std::vector<std::byte> copy(size_bytes);
    pinflow::copy_to_host_async(copy, data, stream);
    stream.synchronize();
    return copy;
}
