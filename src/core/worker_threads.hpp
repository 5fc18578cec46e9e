#pragma once

#include <tbb/global_control.h>

#include <memory>
#include <optional>
#include <string>

namespace pinflow::detail {

/// oneTBB starts its workers when work first needs them, and ends the process if one cannot be started. So
/// they are started before: as many as a trial shows that the system gives, and no more are allowed.
/// The workers stay until the process ends.
///
/// While this lives, parallel work may use `count()` threads, the calling one included.
class worker_threads {
 public:
    /// `wanted`: threads, the calling one included; 0 means one for each core.
    explicit worker_threads(unsigned wanted);

    unsigned count() const noexcept { return count_; }
    /// Why `count` is less than was asked for, as a sentence; empty if it is not.
    const std::string& reason() const noexcept { return reason_; }

 private:
    unsigned count_;
    std::string reason_;
    std::shared_ptr<tbb::global_control> raised_;  ///< if more are asked for than there are cores
};

/// The same for parallel work that takes the threads of oneTBB as they are. To be called before each such
/// work: it costs nothing after the first time, also if there were fewer threads than cores.
void start_worker_threads();

/// Threads to ask for, if the user asks for so many (0: one for each core, or fewer if memory is short).
/// @throws system_failure if memory does not suffice for them.
unsigned requested_threads(unsigned asked);

}  // namespace pinflow::detail
