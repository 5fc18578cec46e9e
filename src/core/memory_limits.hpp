#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pinflow::detail {

/// What the machine says about memory that this process could take or lock; empty where it says nothing.
struct memory_limits {
    std::optional<std::uint64_t> locked_bytes;  ///< RLIMIT_MEMLOCK; empty when unlimited or not binding
    std::optional<std::uint64_t>
        cgroup_bytes;  ///< left in the tightest cgroup, its page cache counted as free
    std::optional<std::uint64_t> available_bytes;  ///< MemAvailable
    std::optional<std::uint64_t> total_bytes;      ///< MemTotal
};

/// Reads /proc and /sys, below `root` in tests.
memory_limits read_memory_limits(const std::string& root = {});

struct memory_bound {
    std::uint64_t size_bytes = 0;
    std::string in_words;  ///< "this machine's memory of 8 bytes"
};

/// What cannot fit even if all else made room: memory is promised freely and given later, so that whoever
/// fills more than this is killed half-way.
memory_bound most_new_memory(const memory_limits& limits);

}  // namespace pinflow::detail
