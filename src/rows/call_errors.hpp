#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "src/device/row_work.hpp"
#include "src/rows/scratch.hpp"

namespace pinflow::detail {

/// A call whose error may be found after it has returned.
class pending_call {
 public:
    explicit pending_call(pinned_scratch::block& memory) : memory_(memory) {}

    /// The errors of its indices, in page-locked memory; none at first.
    index_errors* errors() const noexcept { return reinterpret_cast<index_errors*>(memory_.data()); }
    /// Adds an exception from one of pinflow's threads. Only the first one is kept. Thread-safe.
    void add(std::exception_ptr failure) noexcept;

 private:
    friend class call_errors;
    enum class state : std::uint8_t { begun, expected, ended };
    /// Builds the exception of wrong indices; null if there are none.
    std::exception_ptr error_of_indices() const;

    pinned_scratch::block& memory_;  ///< its mark is the end of the call
    state state_ = state::begun;
    bool is_listed_ = false;
    std::string what_;
    std::uint64_t count_ = 0;
    std::uint64_t row_count_ = 0;
    std::exception_ptr error_;  ///< of an ended call; null once it was thrown
    std::mutex mutex_;          ///< for failure_
    std::exception_ptr failure_;
};

/// Keeps errors that are found after a call has returned, until someone asks for them. The handles of calls
/// share it, so that it may outlive the exchange. Thread-safe. `close` waits for streams. `expect` and
/// `forget` with a stream block while the queue of that stream is full, without the lock. Other members do
/// not wait for streams.
class call_errors {
 public:
    /// If many more errors than this are not asked for, only their handles have the oldest.
    static constexpr std::size_t max_listed = 1024;

    explicit call_errors(pinflow::device device) : memory_(std::in_place, device) {}
    call_errors(const call_errors&) = delete;
    call_errors& operator=(const call_errors&) = delete;
    ~call_errors() { close(); }

    /// Begins a call. Forgets earlier calls that have ended without an error, from time to time.
    std::shared_ptr<pending_call> begin();
    /// Makes the error of the call available once `stream` has completed the work enqueued so far: from
    /// `check(call)` and, if `is_listed`, also from `check()`. The call had `count` indices. `what` begins
    /// the message.
    void expect(const std::shared_ptr<pending_call>& begun, std::string what, std::uint64_t count,
                std::uint64_t row_count, stream_view stream, bool is_listed = true);
    /// Drops the call without reporting it. Its memory is in use until `stream` has completed the work
    /// enqueued so far.
    void forget(const pending_call& begun, stream_view stream);
    /// The same for a call whose memory no stream uses.
    void forget(const pending_call& begun) noexcept;

    /// Throws the error of the oldest listed call that has ended with one. Throws each error once.
    /// @throws invalid_argument for wrong indices, or the exception given to `pending_call::add`.
    void check();
    /// The same for one call.
    void check(pending_call& call);

    /// Waits until the streams have passed the calls, keeps their errors for their handles, and frees the
    /// memory. No call may begin afterwards.
    void close() noexcept;

 private:
    // with the lock held
    bool has_ended(pending_call& call);
    void end(pending_call& call) noexcept;
    void forget_ended();

    std::mutex mutex_;
    std::optional<pinned_scratch> memory_;  ///< until `close`
    std::size_t next_scan_ = 0;             ///< the number of calls from which on ended ones are forgotten
    std::list<std::shared_ptr<pending_call>>
        calls_;  ///< in their order; without those whose error was thrown
};

/// "3 of 131072 row numbers are outside the table, which has 10 rows: the first is 12, at position 7".
std::string outside_sentence(const std::string& what, std::uint64_t outside_count, std::uint64_t count,
                             std::uint64_t row_count, std::uint64_t id, std::uint64_t position);

}  // namespace pinflow::detail
