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

/// Where a version of cgroups says what a group may use, and what it uses.
struct cgroup_files {
    std::string_view mount;
    std::string_view limit;
    std::string_view usage;
    std::string_view page_cache;  ///< labels in memory.stat
    std::string_view shared;
    std::string_view slab;
};
constexpr cgroup_files version_2{"/sys/fs/cgroup", "memory.max", "memory.current",
                                 "file ",          "shmem ",     "slab_reclaimable "};
constexpr cgroup_files version_1{
    "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
    "total_cache ",          "total_shmem ",          "total_slab_reclaimable "};  // which it does not list

/// The path of the group that has the controller "memory" in version 1, by /proc/self/cgroup.
std::string_view memory_group(std::string_view membership) {
    while (!membership.empty()) {
        std::string_view line = membership.substr(0, membership.find('\n'));
        membership.remove_prefix(std::min(membership.size(), line.size() + 1));
        line.remove_prefix(std::min(line.size(), line.find(':') + 1));  // the number of the hierarchy
        std::string_view controllers = line.substr(0, line.find(':'));
        line.remove_prefix(std::min(line.size(), controllers.size() + 1));
        while (!controllers.empty()) {
            const std::string_view controller = controllers.substr(0, controllers.find(','));
            if (controller == "memory") return line;
            controllers.remove_prefix(std::min(controllers.size(), controller.size() + 1));
        }
    }
    return {};
}

/// A limit on any level binds.
void read_groups(const std::string& root, std::string group, const cgroup_files& files,
                 memory_limits& limits) {
    constexpr std::uint64_t unlimited = std::uint64_t{1} << 62;  // version 1 has a number for it
    if (!group.starts_with('/')) group.clear();
    for (;;) {
        std::string folder = root;
        folder.append(files.mount).append(group).append(group.ends_with('/') ? "" : "/");
        const auto number_in = [&](std::string_view file) {
            return parse_number(read_proc_text(folder + std::string(file)));
        };
        const auto max_bytes = number_in(files.limit);  // "max" is no number
        const auto current = number_in(files.usage);
        if (max_bytes && *max_bytes < unlimited && current) {
            const std::string statistics = read_proc_text(folder + "memory.stat");
            const auto statistic = [&](std::string_view label) {
                return parse_number(word_after(statistics, label)).value_or(0);
            };
            // the page cache but for tmpfs, and what the kernel remembers of files
            const std::uint64_t file = statistic(files.page_cache), shared = statistic(files.shared);
            const std::uint64_t droppable = file - std::min(file, shared) + statistic(files.slab);
            const std::uint64_t used = *current - std::min(*current, droppable);
            keep_smaller(limits.cgroup_bytes, *max_bytes - std::min(*max_bytes, used));
            keep_smaller(limits.cgroup_limit_bytes, *max_bytes);
        }
        if (group.empty() || group == "/") return;
        group.erase(group.rfind('/'));
    }
}

/// Of either version: only one of them has the controller for memory.
void read_cgroups(const std::string& root, memory_limits& limits) {
    const std::string membership = read_proc_text(root + "/proc/self/cgroup");
    read_groups(root, std::string(word_after(membership, "0::")), version_2, limits);
    read_groups(root, std::string(memory_group(membership)), version_1, limits);
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
