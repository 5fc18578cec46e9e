#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pinflow::detail {

/// What the machine says about memory that this process could take or lock; empty where it says nothing.
struct memory_limits {
    std::optional<std::uint64_t> locked_bytes;  ///< RLIMIT_MEMLOCK; empty when unlimited or not binding
    /// Left in the tightest cgroup (version 1 or 2), what the kernel can drop counted as free.
    std::optional<std::uint64_t> cgroup_bytes;
    std::optional<std::uint64_t> available_bytes;  ///< MemAvailable
};

/// Reads /proc and /sys, below `root` in tests.
memory_limits read_memory_limits(const std::string& root = {});

/// All the memory of this machine.
std::uint64_t machine_memory_bytes();

// ---- memory that is about to be taken ---------------------------------------------------------------------

/// The memory that this process can still fill.
struct available_memory {
    std::uint64_t size_bytes = 0;
    std::string_view bound;  ///< what limits it, as the end of a sentence: "the cgroup has left"
};

/// Returns the smallest of MemAvailable, what each cgroup has left and what RLIMIT_AS leaves. Page cache
/// counts as free. Regions of memory_region::anonymous count as used before they are touched, as far as they
/// exceed the anonymous memory that the process has touched. One eighth of the result, at most 64 MiB, is
/// kept back for stacks, page tables and small allocations. Takes some 100 us: call it once an object, not
/// once a batch.
available_memory read_available_memory(const std::string& root = {});

/// The addresses that this process has taken, as RLIMIT_AS counts them.
std::uint64_t own_address_bytes();

/// Says why `size_bytes` more of memory are not available, as the end of a sentence ("more than the 8 bytes
/// of memory that the cgroup has left"). Empty if they are, and always for less than 1 MiB. Check before
/// memory is touched: Linux overcommits, and the OOM killer ends the process that touches it.
std::string memory_shortage(std::uint64_t size_bytes);

/// Checks that `size_bytes` of memory are available.
/// @throws system_failure if not: "SUBJECT, more than the 8 bytes of memory that ...; HELP".
void require_memory(std::uint64_t size_bytes, std::string_view subject, std::string_view help = {});

struct thread_allowance {
    unsigned count;
    std::string reason;  ///< why that is less than the default; empty if it is not
};

/// The number of threads to start: `asked`, or for 0 `default_count`, fewer if memory is short.
/// @throws system_failure if memory does not suffice for `asked` threads.
thread_allowance threads_within_memory(unsigned asked, unsigned default_count);

/// Bytes of all live regions of memory_region::anonymous, touched or not.
inline std::atomic<std::uint64_t> region_memory_bytes = 0;

/// For tests: this much is available, for its lifetime; one at a time.
class scoped_available_memory {
 public:
    explicit scoped_available_memory(std::uint64_t size_bytes);
    ~scoped_available_memory();
    scoped_available_memory(const scoped_available_memory&) = delete;
    scoped_available_memory& operator=(const scoped_available_memory&) = delete;
};

}  // namespace pinflow::detail
