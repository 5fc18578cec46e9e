#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pinflow::detail {

/// The limits on memory that this process could allocate or lock. A member is empty if the limit is unknown.
struct memory_limits {
    std::optional<std::uint64_t> locked_bytes;  ///< RLIMIT_MEMLOCK; empty if unlimited or not enforced
    /// Bytes left in the tightest cgroup (version 1 or 2). Memory that the kernel can drop counts as free.
    std::optional<std::uint64_t> cgroup_bytes;
    std::optional<std::uint64_t> available_bytes;  ///< MemAvailable
};

/// Reads the limits from /proc and /sys. Tests give a `root` directory for both.
memory_limits read_memory_limits(const std::string& root = {});

/// Total memory of this machine, in bytes.
std::uint64_t machine_memory_bytes();

// ---- memory that is about to be taken ---------------------------------------------------------------------

/// The memory that this process can still fill.
struct available_memory {
    std::uint64_t size_bytes = 0;
    std::string_view bound;  ///< the limit, as the end of a sentence: "the cgroup has left"
};

/// Returns the smallest of MemAvailable, what each cgroup has left and what RLIMIT_AS leaves. Page cache
/// counts as free. Regions of memory_region::anonymous count as used before they are touched, as far as they
/// exceed the anonymous memory that the process has touched. One eighth of the result, at most 64 MiB, is
/// kept back for stacks, page tables and small allocations. Takes some 100 us: call it once per object, not
/// once per batch.
available_memory read_available_memory(const std::string& root = {});

/// Bytes of address space that this process uses, as RLIMIT_AS counts them.
std::uint64_t own_address_bytes();

/// Says why a file of this size should not be mapped, even if RLIMIT_AS allows it: too little address space
/// would be left for the stacks of threads and for allocations. Empty if it can be mapped.
std::string mapping_shortage(std::uint64_t size_bytes);

/// Says why another `size_bytes` of memory are not available, as the end of a sentence ("more than the 8
/// bytes that may be taken of the memory that the cgroup has left"). Empty if they are available, and always
/// for less than 1 MiB. Check before memory is touched: Linux overcommits, and the OOM killer ends the
/// process that touches it.
std::string memory_shortage(std::uint64_t size_bytes);

/// Checks that `size_bytes` of memory are available.
/// @throws system_failure if not: "SUBJECT, more than the 8 bytes that may be taken of the memory that ...;
/// HELP".
void require_memory(std::uint64_t size_bytes, std::string_view subject, std::string_view help = {});

struct thread_allowance {
    unsigned count;
    std::string reason;  ///< why `count` is less than the default; empty if it is not
};

/// Returns the number of threads to start: `requested` if it is not 0. Otherwise `default_count`, or fewer
/// (at least 1) if their memory would exceed an eighth of the available memory.
/// @throws system_failure if memory does not suffice for `requested` threads.
thread_allowance threads_within_memory(unsigned requested, unsigned default_count);

/// Bytes of all live regions of memory_region::anonymous, touched or not.
inline std::atomic<std::uint64_t> region_memory_bytes = 0;

/// Whether a live region of memory_region::anonymous ends at `end`. No other object uses the rest of the
/// region's last page. Thread-safe.
bool is_region_end(const std::byte* end);

/// For tests: sets the available memory for its lifetime. Only one may exist at a time.
class scoped_available_memory {
 public:
    explicit scoped_available_memory(std::uint64_t size_bytes);
    ~scoped_available_memory();
    scoped_available_memory(const scoped_available_memory&) = delete;
    scoped_available_memory& operator=(const scoped_available_memory&) = delete;
};

}  // namespace pinflow::detail
