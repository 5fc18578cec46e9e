#pragma once

#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "src/device/row_work.hpp"
#include "src/rows/scratch.hpp"

namespace pinflow::detail {

/// Keeps errors that are found after a call has returned, until `check`. For one thread at a time, except
/// `call::add`.
class call_errors {
 public:
    call_errors(pinflow::device device, pinned_scratch& memory) : device_(device), memory_(memory) {}
    call_errors(const call_errors&) = delete;
    call_errors& operator=(const call_errors&) = delete;
    /// Waits until the streams have completed the calls.
    ~call_errors();

    /// One call that may go wrong.
    class call {
     public:
        call(pinned_scratch::block& memory, pinflow::device device, std::uint64_t waiter)
            : memory_(memory), there_(device), waiter_(waiter) {}

        /// The errors of its indices, in page-locked memory; none at first.
        index_errors* errors() const noexcept { return reinterpret_cast<index_errors*>(memory_.data()); }
        /// Adds an exception from one of pinflow's threads. Only the first one is kept. Thread-safe.
        void add(std::exception_ptr failure) noexcept;

     private:
        friend class call_errors;
        pinned_scratch::block& memory_;
        event there_;
        std::uint64_t waiter_;
        std::string what_;
        std::uint64_t count_ = 0;
        std::uint64_t row_count_ = 0;
        std::mutex mutex_;
        std::exception_ptr failure_;
    };

    /// Begins a call. `check(waiter)` with the same number throws its error; for 0, `check()` does.
    std::shared_ptr<call> begin(std::uint64_t waiter = 0);
    /// Makes `check` report the errors of the call once `stream` has completed the work enqueued so far. The
    /// call had `count` indices. `what` begins the message.
    void expect(std::shared_ptr<call> begun, std::string what, std::uint64_t count, std::uint64_t row_count,
                stream_view stream);
    /// Drops the call without reporting it. Its memory is in use until `stream` has completed the work
    /// enqueued so far.
    void forget(const call& begun, stream_view stream);

    /// Throws the error of the waiter's oldest finished call that failed, and forgets that call. Does nothing
    /// if none failed. @throws invalid_argument for wrong indices, or the exception given to `call::add`.
    void check(std::uint64_t waiter = 0);

 private:
    pinflow::device device_;
    pinned_scratch& memory_;
    std::list<std::shared_ptr<call>> expected_;
};

/// "3 of 131072 row numbers are outside the table, which has 10 rows: the first is 12, at position 7".
std::string outside_sentence(const std::string& what, std::uint64_t outside_count, std::uint64_t count,
                             std::uint64_t row_count, std::uint64_t id, std::uint64_t position);

}  // namespace pinflow::detail
