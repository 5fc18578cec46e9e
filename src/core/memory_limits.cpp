#include "src/core/memory_limits.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <string_view>
#include <system_error>

#include "pinflow/error.hpp"
#include "src/core/proc_text.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

void keep_smaller(std::optional<std::uint64_t>& min_value, std::uint64_t value) {
    min_value = std::min(value, min_value.value_or(std::numeric_limits<std::uint64_t>::max()));
}

/// The files of one cgroup version that hold a group's limit and its usage.
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
// version 1 does not list the slab label, so it counts as 0
constexpr cgroup_files version_1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                 "total_cache ",          "total_shmem ",          "total_slab_reclaimable "};

/// The path of the group with the controller "memory" in version 1, from /proc/self/cgroup.
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

/// Reads what a group and the groups above it have left. The lowest value applies.
void read_groups(const std::string& root, std::string group, const cgroup_files& files,
                 memory_limits& limits) {
    constexpr std::uint64_t unlimited = std::uint64_t{1} << 62;  // version 1 writes a large number
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
            // the page cache without tmpfs, and reclaimable slab
            const std::uint64_t file = statistic(files.page_cache), shared = statistic(files.shared);
            const std::uint64_t droppable = file - std::min(file, shared) + statistic(files.slab);
            const std::uint64_t used = *current - std::min(*current, droppable);
            keep_smaller(limits.cgroup_bytes, *max_bytes - std::min(*max_bytes, used));
        }
        if (group.empty() || group == "/") return;
        group.erase(group.rfind('/'));
    }
}

/// Reads both versions: only one of them has the memory controller.
void read_cgroups(const std::string& root, memory_limits& limits) {
    const std::string membership = read_proc_text(root + "/proc/self/cgroup");
    read_groups(root, std::string(word_after(membership, "0::")), version_2, limits);
    read_groups(root, std::string(memory_group(membership)), version_1, limits);
}

/// MemAvailable.
std::optional<std::uint64_t> read_machine(const std::string& root) {
    const std::string machine = read_proc_text(root + "/proc/meminfo");
    const auto kibibytes = parse_number(word_after(machine, "MemAvailable:"));
    if (!kibibytes) return {};
    return *kibibytes * 1024;
}

/// The memory of the process, from /proc/self/statm.
struct own_memory {
    std::uint64_t address_bytes = 0;
    std::uint64_t anonymous_bytes = 0;  ///< resident, not backed by a file
};

own_memory read_own_memory(const std::string& root) {
    std::istringstream text(read_proc_text(root + "/proc/self/statm"));
    std::uint64_t size = 0, resident = 0, shared = 0;
    if (!(text >> size >> resident >> shared)) return {};
    const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    return {size * page_bytes, (resident - std::min(resident, shared)) * page_bytes};
}

std::atomic<std::uint64_t> available_to_tests = std::numeric_limits<std::uint64_t>::max();

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
    limits.available_bytes = read_machine(root);
    return limits;
}

std::uint64_t machine_memory_bytes() {
    return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
           static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

available_memory read_available_memory(const std::string& root) {
    if (const std::uint64_t set = available_to_tests; set != std::numeric_limits<std::uint64_t>::max())
        return {set, "a test leaves"};
    available_memory available{read_machine(root).value_or(machine_memory_bytes()), "this machine has left"};
    memory_limits limits;
    read_cgroups(root, limits);
    if (limits.cgroup_bytes && *limits.cgroup_bytes < available.size_bytes)
        available = {*limits.cgroup_bytes, "the cgroup has left"};
    const own_memory own = read_own_memory(root);
    const std::uint64_t regions = region_memory_bytes;
    const std::uint64_t untouched = regions - std::min(regions, own.anonymous_bytes);
    available.size_bytes -= std::min(available.size_bytes, untouched);
    // RLIMIT_AS counts addresses before they are touched
    if (const auto max_bytes = system::max_address_bytes()) {
        const std::uint64_t left = *max_bytes - std::min(*max_bytes, own.address_bytes);
        if (left < available.size_bytes) available = {left, "`ulimit -v` leaves"};
    }
    constexpr std::uint64_t max_reserve_bytes = std::uint64_t{64} << 20;
    available.size_bytes -= std::min(available.size_bytes / 8, max_reserve_bytes);
    return available;
}

std::uint64_t own_address_bytes() {
    return read_own_memory({}).address_bytes;
}

std::string mapping_shortage(std::uint64_t size_bytes) {
    constexpr std::uint64_t small_bytes = std::uint64_t{8} << 20;
    constexpr std::uint64_t kept_free_bytes = std::uint64_t{128} << 20;
    const auto max_bytes = system::max_address_bytes();
    if (!max_bytes || size_bytes < small_bytes) return {};
    const std::uint64_t left_bytes = *max_bytes - std::min(*max_bytes, own_address_bytes());
    if (left_bytes >= kept_free_bytes && left_bytes - kept_free_bytes >= size_bytes) return {};
    return fmt::format(
        "cannot map {} bytes: `ulimit -v` leaves {} bytes of address space, and {} must stay free for "
        "threads and allocations",
        size_bytes, left_bytes, kept_free_bytes);
}

std::string memory_shortage(std::uint64_t size_bytes) {
    constexpr std::uint64_t small_bytes = std::uint64_t{1} << 20;
    if (size_bytes < small_bytes) return {};
    const available_memory available = read_available_memory();
    if (size_bytes <= available.size_bytes) return {};
    return fmt::format("more than the {} bytes that may be taken of the memory that {}", available.size_bytes,
                       available.bound);
}

void require_memory(std::uint64_t size_bytes, std::string_view subject, std::string_view help) {
    const std::string shortage = memory_shortage(size_bytes);
    if (shortage.empty()) return;
    throw system_failure(fmt::format("{}, {}{}{}", subject, shortage, help.empty() ? "" : "; ", help),
                         std::make_error_code(std::errc::not_enough_memory));
}

thread_allowance threads_within_memory(unsigned requested, unsigned default_count) {
    // a stack, the kernel's data for a thread, and the allocator's cache
    constexpr std::uint64_t thread_bytes = 256 << 10;
    if (requested != 0) {
        const std::uint64_t size_bytes = requested * thread_bytes;
        require_memory(size_bytes, fmt::format("{} threads take {} bytes of memory", requested, size_bytes),
                       "ask for fewer threads");
        return {requested, {}};
    }
    // an eighth at most: the data of the threads needs more than the threads themselves
    const available_memory available = read_available_memory();
    const std::uint64_t fitting = available.size_bytes / 8 / thread_bytes;
    if (fitting >= default_count) return {default_count, {}};
    const auto count = static_cast<unsigned>(std::max<std::uint64_t>(fitting, 1));
    return {
        count,
        fmt::format("{} of {} threads, at {} KiB each: by default, threads get at most an eighth of the {} "
                    "bytes that may be taken of the memory that {}",
                    count, default_count, thread_bytes >> 10, available.size_bytes, available.bound)};
}

scoped_available_memory::scoped_available_memory(std::uint64_t size_bytes) {
    available_to_tests = size_bytes;
}

scoped_available_memory::~scoped_available_memory() {
    available_to_tests = std::numeric_limits<std::uint64_t>::max();
}

}  // namespace pinflow::detail
