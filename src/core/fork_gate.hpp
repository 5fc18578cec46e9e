#pragma once

namespace pinflow::detail {

/// Makes forks wait for sections, from now on. Call it before a thread is started that has sections: the
/// thread itself might be inside this call when another one forks. Thread-safe; only the first call costs
/// anything.
void watch_forks();

/// One of pinflow's own threads works in oneTBB while this lives. A fork waits for such work, at most 200 ms:
/// otherwise the child could inherit locks of oneTBB and its allocator that nobody unlocks, and hang as soon
/// as it uses oneTBB itself.
class unforked_section {
 public:
    /// Waits while another thread forks.
    unforked_section();
    unforked_section(const unforked_section&) = delete;
    unforked_section& operator=(const unforked_section&) = delete;
    ~unforked_section();
};

/// Whether a thread waits to fork, so that sections should end soon. Thread-safe.
bool is_fork_pending() noexcept;

}  // namespace pinflow::detail
