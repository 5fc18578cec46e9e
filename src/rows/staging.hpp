#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// Page-locked buffers through which rows pass piece by piece. The CPU works on some while the copy engine
/// works on others. The CPU's work runs as host functions on two streams in turn, so that one stream is busy
/// during the gap between two functions of the other. Two streams are a fifth faster than one
/// (samples/bench/RESULTS.md). For one thread at a time.
class staging_ring {
 public:
    /// Allocates `buffers` pinned buffers of `buffer_bytes`, each with as much device memory. The device
    /// memory is filled with zeros. It comes from `resource`, or, if that is null, from the device's pool.
    staging_ring(pinflow::device device, std::uint64_t buffer_bytes, unsigned buffers,
                 const std::shared_ptr<memory_resource>& resource = nullptr);
    staging_ring(const staging_ring&) = delete;
    staging_ring& operator=(const staging_ring&) = delete;
    /// Waits for all streams.
    ~staging_ring() = default;

    std::uint64_t buffer_bytes() const noexcept { return buffer_bytes_; }
    stream_view copies() const noexcept { return copies_; }
    /// All streams of the ring.
    std::array<stream_view, 3> streams() const noexcept { return {cpu_[0], cpu_[1], copies_}; }

    /// Makes all streams wait for the work enqueued on `user` so far.
    void begin_after(stream_view user);
    /// Makes the streams of host functions wait for the work enqueued on the copy stream so far.
    void cpu_waits_for_copies();
    /// Makes `user` wait for the work enqueued on all streams of the ring.
    void end_before(stream_view user);
    /// Whether all enqueued work is done.
    bool done() const;

    struct buffer {
        buffer(pinflow::device device, std::uint64_t size_bytes, stream_view copies, stream_view cpu_stream,
               const std::shared_ptr<memory_resource>& resource)
            : host(size_bytes, device),
              on_device(size_bytes, copies, resource),
              cpu(cpu_stream),
              filled(device),
              free(device) {}
        pinned_buffer host;
        device_buffer on_device;
        stream_view cpu;  ///< the stream whose host functions work on this buffer
        event filled;     ///< recorded by the stream that writes the buffer
        event free;       ///< recorded by the stream that reads it
    };
    /// The next buffer. The stream that fills it must wait for `free` first.
    buffer& next() { return buffers_[next_++ % buffers_.size()]; }

 private:
    std::uint64_t buffer_bytes_;
    std::vector<buffer> buffers_;  // destroyed after the streams that use them
    std::size_t next_ = 0;
    std::array<stream, 2> cpu_;
    stream copies_;
    event begin_;
    event copied_;
    event end_;
};

/// Staging rings, each for one stream with unfinished work. If two streams shared a ring, the later call
/// would wait for the earlier one. If the caller makes the earlier stream wait for the later one, that is a
/// deadlock. Thread-safe.
class staging_rings {
 public:
    /// The number of rings. A call on a further stream waits while all are in use.
    static constexpr unsigned ring_count = 2;

    /// A ring that one call enqueues on. The destructor makes it available to other calls.
    class taken_ring {
     public:
        taken_ring() noexcept = default;
        taken_ring(staging_rings& from, staging_ring& taken) noexcept : from_(&from), ring_(&taken) {}
        taken_ring(taken_ring&& other) noexcept
            : from_(other.from_), ring_(std::exchange(other.ring_, nullptr)) {}
        taken_ring& operator=(taken_ring&& other) noexcept {
            std::swap(from_, other.from_);
            std::swap(ring_, other.ring_);
            return *this;
        }
        taken_ring(const taken_ring&) = delete;
        taken_ring& operator=(const taken_ring&) = delete;
        ~taken_ring() {
            if (ring_ != nullptr) from_->give_back(*ring_);
        }

        explicit operator bool() const noexcept { return ring_ != nullptr; }
        staging_ring& operator*() const noexcept { return *ring_; }
        staging_ring* operator->() const noexcept { return ring_; }

     private:
        staging_rings* from_ = nullptr;
        staging_ring* ring_ = nullptr;
    };

    /// Makes the rings, unless they exist. The arguments are those of staging_ring.
    /// @throws device_error, or system_failure on the host device, if memory is short.
    void reserve(pinflow::device device, std::uint64_t buffer_bytes, unsigned buffers,
                 const std::shared_ptr<memory_resource>& resource);
    bool has_some() const;

    /// Takes the ring that `stream` used last, otherwise an idle ring. If there is none,
    /// looks again every 50 us. `reserve` must have been called.
    /// @throws device_error if the device has failed.
    taken_ring take(stream_view stream);

 private:
    struct ring {
        ring(pinflow::device device, std::uint64_t buffer_bytes, unsigned count,
             const std::shared_ptr<memory_resource>& resource)
            : buffers(device, buffer_bytes, count, resource) {}
        staging_ring buffers;
        void* stream = nullptr;  ///< the stream that used it last
        bool is_taken = false;
    };
    ring* find(void* stream);
    void give_back(const staging_ring& taken) noexcept;

    mutable std::mutex mutex_;  ///< for the list
    std::list<ring> rings_;
};

}  // namespace pinflow::detail
