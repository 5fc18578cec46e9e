#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail {

class call_memory;

/// A call whose error may be found after it has returned. Its handles share it.
class pending_call {
 public:
    struct facts {
        std::string what;             ///< begins messages about wrong indices
        std::uint64_t count = 0;      ///< indices
        std::uint64_t row_count = 0;  ///< of the table
        /// Whether `calls_in_flight::check()` throws the call's error. `check(call)` does so in any case.
        bool is_listed = true;
    };
    explicit pending_call(facts call) : facts_(std::move(call)) {}
    /// Adds an exception from one of pinflow's threads. Only the first one is kept. Thread-safe.
    void add(std::exception_ptr failure) noexcept;

 private:
    friend class calls_in_flight;
    std::exception_ptr error_of(const index_errors& wrong) const;

    facts facts_;
    call_memory* memory_ = nullptr;  ///< while the call is in flight
    std::uint64_t number_ = 0;       ///< as in call_memory
    std::exception_ptr error_;       ///< set when the call has ended with an error; null once it was thrown
    std::mutex mutex_;               ///< for failure_ while the call is in flight
    std::exception_ptr failure_;
};

/// The device memory of one call's errors.
struct device_error_memory {
    index_errors found;
    error_count counting;
};

/// The reserved memory of one call: page-locked memory for its indices and errors, and device memory for the
/// errors that the device finds. Some also have device memory for the order of the call's rows.
class call_memory {
 public:
    call_memory(std::byte* pinned, device_error_memory* on_device, std::span<std::byte> scratch,
                std::uint64_t max_rows, pinflow::device device)
        : ids_(reinterpret_cast<std::uint64_t*>(pinned)),
          errors_{&on_device->found, reinterpret_cast<index_errors*>(ids_ + max_rows), &on_device->counting},
          scratch_(scratch),
          last_use_(device) {}
    /// The page-locked memory that a call of up to `max_rows` rows needs.
    static std::uint64_t size_bytes(std::uint64_t max_rows) noexcept {
        return max_rows * sizeof(std::uint64_t) + sizeof(index_errors);
    }

    /// Page-locked memory for `max_rows` indices.
    std::uint64_t* ids() const noexcept { return ids_; }
    const error_memory& errors() const noexcept { return errors_; }
    /// Device memory at a multiple of 256 bytes, for any stream. Empty if this call has none.
    std::span<std::byte> scratch() const noexcept { return scratch_; }
    /// Marks `stream`'s work so far as the last use. Blocks while the stream's queue is full.
    void mark(stream_view stream) { last_use_.record(stream); }
    /// Makes `stream` wait until the marked use is over.
    void hold_up(stream_view stream) const { stream.wait(last_use_); }

 private:
    friend class calls_in_flight;
    enum class state : std::uint8_t { free, taken, in_flight };

    std::uint64_t* ids_;
    error_memory errors_;
    std::span<std::byte> scratch_;
    event last_use_;
    state state_ = state::free;
    void* stream_ = nullptr;    ///< of the call that took it
    std::uint64_t number_ = 0;  ///< of the call in flight, in the order in which calls were put in flight
    /// The call in flight; empty if no error is possible. A list, so that ending the call allocates nothing.
    std::list<std::shared_ptr<pending_call>> call_;
};

/// Owns the memory of a call until the call is in flight. If it is never put in flight, the destructor gives
/// the memory back. Then no stream may use it.
class taken_memory {
 public:
    taken_memory() noexcept = default;
    taken_memory(class calls_in_flight& from, call_memory& memory) noexcept
        : from_(&from), memory_(&memory) {}
    taken_memory(taken_memory&& other) noexcept
        : from_(other.from_), memory_(std::exchange(other.memory_, nullptr)) {}
    taken_memory& operator=(taken_memory&& other) noexcept {
        std::swap(from_, other.from_);
        std::swap(memory_, other.memory_);
        return *this;
    }
    taken_memory(const taken_memory&) = delete;
    taken_memory& operator=(const taken_memory&) = delete;
    ~taken_memory();

    explicit operator bool() const noexcept { return memory_ != nullptr; }
    call_memory* operator->() const noexcept { return memory_; }
    /// Gives up the ownership.
    call_memory& release() noexcept { return *std::exchange(memory_, nullptr); }

 private:
    class calls_in_flight* from_ = nullptr;
    call_memory* memory_ = nullptr;
};

/// Owns the memory of the calls of a row exchange that their streams have not passed yet, and keeps the
/// errors of calls until they are read. Handles of calls share ownership, so this may outlive the exchange.
/// Thread-safe. The constructor allocates the memory, and waits until it is cleared. `take` and `close` wait
/// for streams. `put_in_flight` waits while the queue of its stream is full. They hold no lock while they
/// wait. Other members do not wait for streams.
class calls_in_flight {
 public:
    /// The maximum number of errors that `check()` remembers. Beyond it, the oldest error can only be read
    /// through its call's handle.
    static constexpr std::size_t max_listed = 1024;

    /// Allocates memory for `max_calls` calls (at least 1) of up to `max_rows` rows. Up to 8 calls at a time
    /// have `scratch_bytes` of device memory each: fewer, but at least 2, if 8 would take more than 64 MiB.
    /// Device memory comes from `resource`, or, if that is null, from the device's pool.
    /// @throws device_error, or system_failure on the host device, if memory is short; what `resource`
    /// throws.
    calls_in_flight(pinflow::device device, std::uint64_t max_rows, unsigned max_calls,
                    std::uint64_t scratch_bytes = 0, std::shared_ptr<memory_resource> resource = nullptr);
    calls_in_flight(const calls_in_flight&) = delete;
    calls_in_flight& operator=(const calls_in_flight&) = delete;
    ~calls_in_flight() { close(); }

    std::uint64_t max_rows() const noexcept { return max_rows_; }
    /// The maximum number of calls that can be taken at once.
    std::size_t max_together() const noexcept { return (memory_.size() + 1) / 2; }

    /// Takes memory for `count` calls on `stream`, at most `max_together`; their reports are empty. Waits
    /// until this stream, these calls included, has at most half (rounded up) of the memory that no other
    /// stream has. So, if there is memory for two calls or more, a stalled stream leaves memory for other
    /// streams.
    /// @throws device_error if the device has failed.
    std::vector<taken_memory> take(stream_view stream, std::size_t count);

    /// Puts a call in flight: its memory is in use until `stream` has completed the work enqueued so far.
    /// From then on, `check` throws the errors of `call`, which is null if none are possible.
    void put_in_flight(taken_memory& memory, stream_view stream,
                       std::shared_ptr<pending_call> call = nullptr);
    /// Returns memory that no stream uses.
    void give_back(call_memory& memory) noexcept;

    /// Throws the error of the oldest listed call that has ended with one. Throws each error once.
    /// @throws invalid_argument for wrong indices, or the exception given to `pending_call::add`.
    /// @throws device_error if the device has failed.
    void check();
    /// The same for one call.
    void check(pending_call& call);

    /// Waits until the streams have passed the calls, keeps their errors for their handles, and frees the
    /// memory. No call may begin afterwards. If the device has failed, and in a forked process, where nothing
    /// passes the streams, only the destructor frees the memory.
    void close() noexcept;

 private:
    using state = call_memory::state;
    // with the lock held
    bool can_take(void* stream, std::size_t count) const noexcept;
    bool has_free_scratch() const noexcept;
    call_memory* oldest_in_flight(void* stream) noexcept;
    void end_passed();
    void end_oldest(void* stream);
    void end(call_memory& memory) noexcept;
    void await_some(std::unique_lock<std::mutex>& lock, void* stream);

    std::uint64_t max_rows_;
    const ::pid_t process_;
    std::mutex mutex_;                 ///< for the members below
    std::condition_variable changed_;  ///< notified when memory is returned without having been in flight
    pinned_buffer pages_;
    device_buffer on_device_;
    std::vector<call_memory> memory_;
    std::size_t with_scratch_ = 0;  ///< calls at the front of memory_ that have scratch memory
    std::uint64_t last_number_ = 0;
    /// Calls that ended with an error that `check()` has not thrown, in their order.
    std::list<std::shared_ptr<pending_call>> listed_;
};

/// "WHAT: 3 of 131072 indices are outside the table, which has 10 rows: the first is 12, at position 7".
/// If further indices of the group, in device memory, were not checked, the sentence says so. `count` does
/// not include them, and `position` counts them.
std::string outside_sentence(const std::string& what, std::uint64_t outside_count, std::uint64_t count,
                             std::uint64_t row_count, std::uint64_t id, std::uint64_t position,
                             std::uint64_t unchecked_count = 0);

}  // namespace pinflow::detail
