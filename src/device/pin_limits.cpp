#include "src/device/pin_limits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>

namespace pinflow::detail {

namespace {

std::string read_text(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// The first word after `label` at the beginning of a line; empty when there is no such line.
std::string_view value_of(std::string_view text, std::string_view label) {
    for (std::size_t at = text.find(label); at != std::string_view::npos; at = text.find(label, at + 1)) {
        if (at != 0 && text[at - 1] != '\n') continue;
        const std::size_t begin = text.find_first_not_of(" \t", at + label.size());
        if (begin == std::string_view::npos) return {};
        return text.substr(begin, text.find_first_of(" \t\n", begin) - begin);
    }
    return {};
}

std::optional<std::uint64_t> number(std::string_view text, int base = 10) {
    while (!text.empty() && (text.back() == '\n' || text.back() == ' '))
        text.remove_suffix(1);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (error != std::errc() || end != text.data() + text.size() || text.empty()) return {};
    return value;
}

void keep_smaller(std::optional<std::uint64_t>& least, std::uint64_t value) {
    least = std::min(value, least.value_or(std::numeric_limits<std::uint64_t>::max()));
}

/// Version 2 alone, which both of our distributions use. A limit on any level binds.
std::optional<std::uint64_t> cgroup_left(const std::string& root) {
    const std::string membership = read_text(root + "/proc/self/cgroup");
    std::string group(value_of(membership, "0::"));
    if (!group.starts_with('/')) group.clear();
    std::optional<std::uint64_t> least;
    for (;;) {
        const std::string folder = root + "/sys/fs/cgroup" + group + (group.ends_with('/') ? "" : "/");
        const auto most = number(read_text(folder + "memory.max"));  // "max" is no number
        const auto current = number(read_text(folder + "memory.current"));
        if (most && current) {
            const std::string statistics = read_text(folder + "memory.stat");
            const std::uint64_t file = number(value_of(statistics, "file ")).value_or(0);
            const std::uint64_t shared = number(value_of(statistics, "shmem ")).value_or(0);
            const std::uint64_t used = *current - std::min(*current, file - std::min(file, shared));
            keep_smaller(least, *most - std::min(*most, used));
        }
        if (group.empty() || group == "/") return least;
        group.erase(group.rfind('/'));
    }
}

/// One line of /proc/self/maps.
struct mapping {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    bool readable = false;
    bool writable = false;
    bool shared = false;
    bool of_file = false;
};

std::optional<mapping> parse_mapping(std::string_view line) {
    std::array<std::string_view, 5> fields;  // range, permissions, offset, device, inode
    for (std::string_view& field : fields) {
        field = line.substr(0, line.find(' '));
        line.remove_prefix(std::min(line.size(), field.size() + 1));
    }
    const std::size_t dash = fields[0].find('-');
    if (dash == std::string_view::npos || fields[1].size() < 4) return {};
    const auto begin = number(fields[0].substr(0, dash), 16);
    const auto end = number(fields[0].substr(dash + 1), 16);
    if (!begin || !end) return {};
    return mapping{*begin,
                   *end,
                   fields[1][0] == 'r',
                   fields[1][1] == 'w',
                   fields[1][3] == 's',
                   number(fields[4]).value_or(0) != 0};
}

/// What the driver did with each kind on driver 580, CUDA 13.0, Linux 6.18.
page_verdict judge(const mapping& pages) {
    if (!pages.readable) return {.refusal = "it is mapped without the right to read"};
    if (pages.shared) {
        // a writable one is taken as it is: the driver accepts it in shared memory and refuses it at once on
        // a disk
        return {.read_only = !pages.writable, .shared = true, .refusal = {}};
    }
    if (pages.of_file) {
        // the worst combination: registering a private file mapping copies all of it when it is writable, and
        // does not come back at all when it is read-only
        return {.refusal =
                    "it is a private mapping of a file, and only shared mappings can be registered in place"};
    }
    if (!pages.writable) return {.refusal = "it is private memory that is mapped for reading only"};
    return {};
}

}  // namespace

memory_limits read_memory_limits(const std::string& root) {
    memory_limits limits;
    const std::string status = read_text(root + "/proc/self/status");
    constexpr unsigned ipc_lock = 14;  // CAP_IPC_LOCK lifts the limit
    const std::uint64_t capabilities = number(value_of(status, "CapEff:"), 16).value_or(0);
    if ((capabilities >> ipc_lock & 1) == 0) {
        const std::string own_limits = read_text(root + "/proc/self/limits");
        limits.locked_bytes = number(value_of(own_limits, "Max locked memory"));
    }
    limits.cgroup_bytes = cgroup_left(root);
    const std::string machine = read_text(root + "/proc/meminfo");
    if (const auto kibibytes = number(value_of(machine, "MemAvailable:")))
        limits.available_bytes = *kibibytes * 1024;
    return limits;
}

pin_budget choose_pin_budget(std::uint64_t setting_bytes, const memory_limits& limits) {
    pin_budget most{std::numeric_limits<std::uint64_t>::max(), "no limit"};
    if (limits.available_bytes) most = {*limits.available_bytes, "the memory that is available"};
    if (limits.cgroup_bytes && *limits.cgroup_bytes < most.size_bytes) {
        most = {*limits.cgroup_bytes, "what the cgroup has left"};
    }
    if (setting_bytes != 0) {
        return setting_bytes <= most.size_bytes ? pin_budget{setting_bytes, "the pin budget that was set"}
                                                : most;
    }
    if (most.size_bytes != std::numeric_limits<std::uint64_t>::max()) {
        most = {most.size_bytes / 4 * 3, "three quarters of " + most.source};
    }
    if (limits.locked_bytes && *limits.locked_bytes < most.size_bytes) {
        return {*limits.locked_bytes,
                "RLIMIT_MEMLOCK; `ulimit -l` raises it, and a pin budget that is set passes it"};
    }
    return most;
}

page_verdict judge_pages(std::string_view maps, std::span<const std::byte> pages) {
    if (maps.empty()) return {.refusal = "/proc/self/maps cannot be read to see what kind of memory it is"};
    auto at = reinterpret_cast<std::uintptr_t>(pages.data());
    const std::uintptr_t end = at + pages.size();
    std::optional<page_verdict> first;
    while (!maps.empty() && at < end) {
        const std::string_view line = maps.substr(0, maps.find('\n'));
        maps.remove_prefix(std::min(maps.size(), line.size() + 1));
        const std::optional<mapping> there = parse_mapping(line);
        if (!there || there->end <= at) continue;
        if (there->begin > at) break;
        page_verdict verdict = judge(*there);
        if (!verdict.refusal.empty()) return verdict;
        if (first && (first->read_only != verdict.read_only || first->shared != verdict.shared)) {
            return {.refusal = "it spans mappings of different kinds"};
        }
        first = std::move(verdict);
        at = there->end;
    }
    if (at < end) return {.refusal = "not all of it is mapped"};
    return first.value_or(page_verdict{});
}

std::string read_own_maps() {
    return read_text("/proc/self/maps");
}

std::string in_binary_units(std::uint64_t size_bytes) {
    constexpr std::array units{"bytes", "KiB", "MiB", "GiB", "TiB"};
    std::size_t unit = 0;
    auto value = static_cast<double>(size_bytes);
    while (value >= 1024 && unit + 1 < units.size()) {
        value /= 1024;
        ++unit;
    }
    return unit == 0 ? fmt::format("{} bytes", size_bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

}  // namespace pinflow::detail
