#include "src/core/memory_limits.hpp"

#include <fmt/format.h>
#include <unistd.h>

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
void read_cgroups(const std::string& root, memory_limits& limits) {
    const std::string membership = read_proc_text(root + "/proc/self/cgroup");
    std::string group(word_after(membership, "0::"));
    if (!group.starts_with('/')) group.clear();
    for (;;) {
        const std::string folder = root + "/sys/fs/cgroup" + group + (group.ends_with('/') ? "" : "/");
        const auto most = parse_number(read_proc_text(folder + "memory.max"));  // "max" is no number
        const auto current = parse_number(read_proc_text(folder + "memory.current"));
        if (most && current) {
            const std::string statistics = read_proc_text(folder + "memory.stat");
            const auto statistic = [&](std::string_view label) {
                return parse_number(word_after(statistics, label)).value_or(0);
            };
            // the page cache but for tmpfs, and what the kernel remembers of files
            const std::uint64_t file = statistic("file "), shared = statistic("shmem ");
            const std::uint64_t droppable = file - std::min(file, shared) + statistic("slab_reclaimable ");
            const std::uint64_t used = *current - std::min(*current, droppable);
            keep_smaller(limits.cgroup_bytes, *most - std::min(*most, used));
            keep_smaller(limits.cgroup_limit_bytes, *most);
        }
        if (group.empty() || group == "/") return;
        group.erase(group.rfind('/'));
    }
}

std::optional<std::uint64_t> cgroup_limit_of_tests;

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
    read_cgroups(root, limits);
    const std::string machine = read_proc_text(root + "/proc/meminfo");
    if (const auto kibibytes = parse_number(word_after(machine, "MemAvailable:")))
        limits.available_bytes = *kibibytes * 1024;
    return limits;
}

std::uint64_t machine_memory_bytes() {
    return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
           static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string why_beyond_memory(std::uint64_t size_bytes) {
    constexpr std::uint64_t small_bytes = std::uint64_t{64} << 20;
    if (size_bytes < small_bytes) return {};
    const std::uint64_t machine_bytes = machine_memory_bytes();
    memory_limits limits;
    read_cgroups({}, limits);
    if (cgroup_limit_of_tests) limits.cgroup_limit_bytes = cgroup_limit_of_tests;
    const std::uint64_t cgroup_bytes = limits.cgroup_limit_bytes.value_or(machine_bytes);
    if (size_bytes <= std::min(machine_bytes, cgroup_bytes)) return {};
    if (cgroup_bytes < machine_bytes) {
        return fmt::format("more than the {} bytes of memory that the cgroup may have", cgroup_bytes);
    }
    return fmt::format("more than this machine's memory of {} bytes", machine_bytes);
}

scoped_cgroup_limit::scoped_cgroup_limit(std::uint64_t size_bytes) {
    cgroup_limit_of_tests = size_bytes;
}

scoped_cgroup_limit::~scoped_cgroup_limit() {
    cgroup_limit_of_tests.reset();
}

}  // namespace pinflow::detail
