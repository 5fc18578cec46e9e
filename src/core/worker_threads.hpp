#pragma once

#include <tbb/global_control.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace pinflow::detail {

/// Starts oneTBB's workers in advance. By itself, oneTBB would start them with the first work, and end the
/// process if one cannot be started. A trial counts how many threads the system can start. 12 of them are
/// left to other work. If the rest, with the calling thread, are fewer than wanted and fewer than the cores,
/// oneTBB is limited to them. The workers stay until the process ends.
///
/// While this lives, parallel work may use `count()` threads, the calling one included, unless the program
/// allows oneTBB fewer than there are cores (tbb::global_control).
class worker_threads {
 public:
    /// @param wanted threads, the calling one included; at most 1024 are started. 0 means one for each core,
    /// or fewer if memory is short.
    /// @throws system_failure if memory does not suffice for `wanted` threads.
    explicit worker_threads(unsigned wanted);

    unsigned count() const noexcept { return count_; }
    /// Why `count` is less than min(wanted, 1024), or less than the number of cores if `wanted` is 0; empty
    /// if it is not.
    const std::string& reason() const noexcept { return reason_; }

 private:
    unsigned count_;
    std::string reason_;
    std::shared_ptr<tbb::global_control> raised_;  ///< if more are asked for than there are cores
};

/// Starts oneTBB's workers for one thread per core, the calling one included, or for fewer if the trial finds
/// that the system cannot start as many. Call it before parallel work that does not use `worker_threads`.
/// Only the first call costs anything.
void start_worker_threads();

/// Calls work(0) to work(count - 1) on the workers and the calling thread. Other oneTBB work of the caller
/// neither runs meanwhile on the calling thread nor cancels this. In a forked process, whose workers stayed
/// in the parent, the calling thread makes all calls. Throws what one of the calls throws.
void run_in_parallel(std::size_t count, const std::function<void(std::size_t)>& work);

/// Calls `work`, in which run_in_parallel uses the calling thread only. Throws what it throws.
void run_serially(const std::function<void()>& work);

}  // namespace pinflow::detail
