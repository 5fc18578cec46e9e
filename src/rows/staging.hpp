#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// Page-locked slots through which rows pass piece by piece: the CPU works on some while the copy engine
/// works on others. The CPU's work are host functions on two streams in turn: while one function has ended
/// and the next of its stream has not begun, that of the other stream goes on (a fifth faster than one
/// stream: samples/bench/RESULTS.md). For one thread at a time.
class staging {
 public:
    /// `slot_bytes` each, and as much device memory beside it, zero at first.
    staging(pinflow::device device, std::uint64_t slot_bytes, unsigned slots);
    staging(const staging&) = delete;
    staging& operator=(const staging&) = delete;
    /// Waits for all streams.
    ~staging() = default;

    std::uint64_t slot_bytes() const noexcept { return slot_bytes_; }
    stream_view copies() const noexcept { return copies_; }
    /// All of them.
    std::array<stream_view, 3> streams() const noexcept { return {cpu_[0], cpu_[1], copies_}; }

    /// All streams go on only after what is enqueued on `user` so far.
    void begin_after(stream_view user);
    /// Those of the CPU do, after what `event` was recorded behind.
    void cpu_waits_for(const event& event);
    /// `user` goes on only after what is enqueued on all of them.
    void end_before(stream_view user);
    /// Whether nothing is enqueued that has not passed.
    bool done() const;

    struct slot {
        slot(pinflow::device device, std::uint64_t size_bytes, stream_view copies, stream_view cpu_stream)
            : host(size_bytes, device),
              on_device(size_bytes, copies),
              cpu(cpu_stream),
              filled(device),
              free(device) {}
        pinned_buffer host;
        device_buffer on_device;
        stream_view cpu;  ///< whose host functions work on this slot
        event filled;     ///< by whichever stream comes first
        event free;       ///< by the other one
    };
    /// The next slot. The stream that fills it must wait for `free` first.
    slot& next() { return slots_[next_++ % slots_.size()]; }

 private:
    std::uint64_t slot_bytes_;
    std::vector<slot> slots_;  // they go after the streams that use them
    std::size_t next_ = 0;
    std::array<stream, 2> cpu_;
    stream copies_;
    event begin_;
    event end_;
};

/// As many of them as there are streams under way, so that no stream waits for another: one that waits for
/// work enqueued after its own would never go on. For one thread at a time.
class staging_lanes {
 public:
    staging_lanes(pinflow::device device, std::uint64_t slot_bytes, unsigned slots)
        : device_(device), slot_bytes_(slot_bytes), slots_(slots) {}

    /// The lane that `stream` used last, one that nobody uses any more, or another one. @throws device_error.
    staging& take(stream_view stream);

 private:
    struct lane {
        std::unique_ptr<staging> slots;
        void* stream;  ///< that used it last
    };

    pinflow::device device_;
    std::uint64_t slot_bytes_;
    unsigned slots_;
    std::vector<lane> lanes_;
};

}  // namespace pinflow::detail
