#include "src/core/memory_limits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "src/core/proc_text.hpp"

namespace pinflow::detail {

namespace {

void keep_smaller(std::optional<std::uint64_t>& least, std::uint64_t value) {
    least = std::min(value, least.value_or(std::numeric_limits<std::uint64_t>::max()));
}

/// Version 2 alone, which both of our distributions use. A limit on any level binds.
std::optional<std::uint64_t> cgroup_left(const std::string& root) {
    const std::string membership = read_proc_text(root + "/proc/self/cgroup");
    std::string group(word_after(membership, "0::"));
    if (!group.starts_with('/')) group.clear();
    std::optional<std::uint64_t> least;
    for (;;) {
        const std::string folder = root + "/sys/fs/cgroup" + group + (group.ends_with('/') ? "" : "/");
        const auto most = parse_number(read_proc_text(folder + "memory.max"));  // "max" is no number
        const auto current = parse_number(read_proc_text(folder + "memory.current"));
        if (most && current) {
            const std::string statistics = read_proc_text(folder + "memory.stat");
            const std::uint64_t file = parse_number(word_after(statistics, "file ")).value_or(0);
            const std::uint64_t shared = parse_number(word_after(statistics, "shmem ")).value_or(0);
            const std::uint64_t used = *current - std::min(*current, file - std::min(file, shared));
            keep_smaller(least, *most - std::min(*most, used));
        }
        if (group.empty() || group == "/") return least;
        group.erase(group.rfind('/'));
    }
}

}  // namespace

memory_limits read_memory_limits(const std::string& root) {
    memory_limits limits;
    const std::string status = read_proc_text(root + "/proc/self/status");
    constexpr unsigned ipc_lock = 14;  // CAP_IPC_LOCK lifts the limit
    const std::uint64_t capabilities = parse_number(word_after(status, "CapEff:"), 16).value_or(0);
    if ((capabilities >> ipc_lock & 1) == 0) {
        const std::string own_limits = read_proc_text(root + "/proc/self/limits");
        limits.locked_bytes = parse_number(word_after(own_limits, "Max locked memory"));
    }
    limits.cgroup_bytes = cgroup_left(root);
    const std::string machine = read_proc_text(root + "/proc/meminfo");
    const auto kibibytes = [&](std::string_view label) -> std::optional<std::uint64_t> {
        const std::optional<std::uint64_t> count = parse_number(word_after(machine, label));
        return count ? std::optional(*count * 1024) : std::nullopt;
    };
    limits.available_bytes = kibibytes("MemAvailable:");
    limits.total_bytes = kibibytes("MemTotal:");
    return limits;
}

memory_bound most_new_memory(const memory_limits& limits) {
    memory_bound most{limits.total_bytes.value_or(std::numeric_limits<std::uint64_t>::max()), {}};
    if (limits.cgroup_bytes && *limits.cgroup_bytes < most.size_bytes) {
        return {*limits.cgroup_bytes,
                fmt::format("the {} bytes that the cgroup has left", *limits.cgroup_bytes)};
    }
    most.in_words = fmt::format("this machine's memory of {} bytes", most.size_bytes);
    return most;
}

}  // namespace pinflow::detail
