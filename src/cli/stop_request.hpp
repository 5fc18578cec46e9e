#pragma once

#include <csignal>

namespace pinflow::cli {

/// Records SIGINT and SIGTERM during its lifetime, so that the first one does not end the process. Another
/// one, more than a second after the first, ends it. Those within that second count as the same request,
/// because some supervisors signal a process and then its group. Ignored signals stay ignored. Only one
/// object may exist at a time.
class stop_request {
 public:
    stop_request();
    ~stop_request();
    stop_request(const stop_request&) = delete;
    stop_request& operator=(const stop_request&) = delete;

    /// The first signal that came; 0 as long as none has.
    static int signal() noexcept;

 private:
    struct sigaction interrupted_before_;
    struct sigaction terminated_before_;
};

}  // namespace pinflow::cli
