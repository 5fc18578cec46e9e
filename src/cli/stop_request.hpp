#pragma once

#include <csignal>

namespace pinflow::cli {

/// Notes SIGINT and SIGTERM, as long as it lives, instead of letting them end the process. Whoever insists,
/// more than a second after the first, ends it; repeats within that second are taken for the same request, as
/// some supervisors signal a process and then its group. Signals that are ignored stay ignored. One at a
/// time.
class stop_request {
 public:
    stop_request();
    ~stop_request();
    stop_request(const stop_request&) = delete;
    stop_request& operator=(const stop_request&) = delete;

    /// The signal that came; 0 as long as none has.
    static int signal() noexcept;

 private:
    struct sigaction interrupted_before_;
    struct sigaction terminated_before_;
};

}  // namespace pinflow::cli
