#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pinflow::detail {

/// What the machine says about memory that this process could take or lock; empty where it says nothing.
struct memory_limits {
    std::optional<std::uint64_t> locked_bytes;  ///< RLIMIT_MEMLOCK; empty when unlimited or not binding
    /// Left in the tightest cgroup (version 1 or 2), what the kernel can drop counted as free.
    std::optional<std::uint64_t> cgroup_bytes;
    std::optional<std::uint64_t> cgroup_limit_bytes;  ///< the tightest limit
    std::optional<std::uint64_t> available_bytes;     ///< MemAvailable
};

/// Reads /proc and /sys, below `root` in tests.
memory_limits read_memory_limits(const std::string& root = {});

/// All the memory of this machine.
std::uint64_t machine_memory_bytes();

/// Why so much new memory cannot be had even if all else made room, as the end of a sentence ("more than this
/// machine's memory of 8 bytes"); empty when it may. To be asked before it is filled: memory is promised
/// freely and given later, and whoever fills more than there is is killed half-way. What is small is not
/// looked at.
std::string why_beyond_memory(std::uint64_t size_bytes);

/// For tests: has why_beyond_memory take this for the cgroup's limit, for its lifetime; one at a time.
class scoped_cgroup_limit {
 public:
    explicit scoped_cgroup_limit(std::uint64_t size_bytes);
    ~scoped_cgroup_limit();
    scoped_cgroup_limit(const scoped_cgroup_limit&) = delete;
    scoped_cgroup_limit& operator=(const scoped_cgroup_limit&) = delete;
};

}  // namespace pinflow::detail
