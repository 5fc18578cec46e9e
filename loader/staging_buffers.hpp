#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// Page-locked buffers of one size, through which the CPU's rows pass to a GPU. Few enough to stay in the
/// CPU's last-level cache, from which the GPU then reads. Thread-safe.
class staging_buffers {
 public:
    struct buffer {
        buffer(std::byte* memory, const pinflow::device& device) : data(memory), copied(device) {}
        std::byte* data;
        event copied;  ///< after the last copy from it
    };
    /// A buffer that one thread fills, given back by the destructor.
    class lease {
     public:
        lease(staging_buffers& owner, buffer& taken) : owner_(owner), taken_(taken) {}
        lease(const lease&) = delete;
        lease& operator=(const lease&) = delete;
        ~lease() { owner_.give_back(taken_); }

        std::byte* data() const noexcept { return taken_.data; }
        /// Call it once the copies from the buffer are enqueued in `stream`.
        void record(stream_view stream) const { taken_.copied.record(stream); }

     private:
        staging_buffers& owner_;
        buffer& taken_;
    };

    /// @throws device_error if the memory cannot be page-locked.
    staging_buffers(const pinflow::device& device, std::size_t count, std::uint64_t buffer_bytes);

    /// Takes the buffer that was given back first, and waits until the copies from it have finished. If all
    /// are taken, waits for one: a thread that has a buffer must not take another one.
    /// @throws device_error.
    lease take();

    std::uint64_t buffer_bytes() const noexcept { return buffer_bytes_; }

 private:
    void give_back(buffer& taken) noexcept;

    std::uint64_t buffer_bytes_;
    pinned_buffer memory_;
    std::deque<buffer> all_;  // whose elements stay where they are
    std::mutex mutex_;
    std::condition_variable given_back_;
    std::vector<buffer*>
        free_;  ///< a ring: free_count_ buffers from first_ on, in the order they were given back
    std::size_t first_ = 0;
    std::size_t free_count_;
};

}  // namespace pinflow::detail
