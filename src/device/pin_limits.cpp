#include "src/device/pin_limits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "src/core/memory_limits.hpp"
#include "src/core/proc_text.hpp"
#include "src/device/pin_pages.hpp"

namespace pinflow::detail {

pin_budget choose_pin_budget(std::uint64_t setting_bytes, pin_limit limit, const memory_limits& limits,
                             std::uint64_t buffer_bytes) {
    constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();
    pin_budget budget{unlimited, "no limit"};
    if (limits.available_bytes) budget = {*limits.available_bytes, "the memory that is available"};
    if (limits.cgroup_bytes && *limits.cgroup_bytes < budget.size_bytes) {
        budget = {*limits.cgroup_bytes, "what the cgroup has left"};
    }
    // applies a limit on all page-locked memory: registered pages get what pinned buffers leave of it
    const auto bound_by = [&](std::uint64_t total_bytes, std::string bound) {
        if (buffer_bytes > 0)
            bound += fmt::format(", less {} of pinned buffers", in_binary_units(buffer_bytes));
        const std::uint64_t left_bytes = total_bytes - std::min(total_bytes, buffer_bytes);
        if (left_bytes <= budget.size_bytes) budget = {left_bytes, std::move(bound)};
    };
    if (setting_bytes != 0) {
        bound_by(setting_bytes, "the pin budget that was set");
    } else if (budget.size_bytes != unlimited) {
        budget = {budget.size_bytes / 4 * 3, "three quarters of " + budget.bound};
    }
    if (limit == pin_limit::memlock && limits.locked_bytes)
        bound_by(*limits.locked_bytes, "RLIMIT_MEMLOCK, which `ulimit -l` shows");
    return budget;
}

process_mappings::process_mappings(std::string_view maps) {
    mappings_.reserve(static_cast<std::size_t>(std::ranges::count(maps, '\n')));
    while (!maps.empty()) {
        const std::string_view line = maps.substr(0, maps.find('\n'));
        maps.remove_prefix(std::min(maps.size(), line.size() + 1));
        if (const std::optional<mapping> parsed = parse(line)) mappings_.push_back(*parsed);
    }
}

std::optional<process_mappings::mapping> process_mappings::parse(std::string_view line) {
    std::array<std::string_view, 5> fields;  // range, permissions, offset, device, inode
    for (std::string_view& field : fields) {
        field = line.substr(0, line.find(' '));
        line.remove_prefix(std::min(line.size(), field.size() + 1));
    }
    const std::size_t dash = fields[0].find('-');
    if (dash == std::string_view::npos || fields[1].size() < 4) return {};
    const auto begin = parse_number(fields[0].substr(0, dash), 16);
    const auto end = parse_number(fields[0].substr(dash + 1), 16);
    if (!begin || !end) return {};
    return mapping{*begin,
                   *end,
                   fields[1][0] == 'r',
                   fields[1][1] == 'w',
                   fields[1][3] == 's',
                   parse_number(fields[4]).value_or(0) != 0};
}

/// The rules follow tests of each kind of mapping with driver 580, CUDA 13.0, Linux 6.18.
page_verdict process_mappings::verdict_of(const mapping& pages) {
    if (!pages.readable) return {.refusal = "it is mapped without the right to read"};
    if (pages.shared) {
        // writable mappings are tried: the driver accepts shared memory, and refuses files on a disk at once
        return {.read_only = !pages.writable, .shared = true, .refusal = {}};
    }
    if (pages.of_file) {
        // registering a private file mapping copies all of it if it is writable, and never returns if it is
        // read-only
        return {.refusal =
                    "it is a private mapping of a file, and only shared mappings can be registered in place"};
    }
    if (!pages.writable) return {.refusal = "it is private memory that is mapped for reading only"};
    return {};
}

page_verdict process_mappings::judge(std::span<const std::byte> pages) const {
    if (mappings_.empty())
        return {.refusal = "/proc/self/maps cannot be read to see what kind of memory it is"};
    auto at = reinterpret_cast<std::uintptr_t>(pages.data());
    const std::uintptr_t end = at + pages.size();
    std::optional<page_verdict> first;
    for (auto there = std::ranges::upper_bound(mappings_, at, {}, &mapping::end);
         there != mappings_.end() && there->begin <= at && at < end; ++there) {
        page_verdict verdict = verdict_of(*there);
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

bool process_mappings::may_share_last_page(std::span<const std::byte> bytes) const {
    constexpr std::size_t own_pages_bytes = std::size_t{32} << 20;
    const std::span<const std::byte> pages = pages_of(bytes);
    const std::byte* const end = pages.data() + pages.size();
    if (end == bytes.data() + bytes.size() || bytes.size() >= own_pages_bytes) return false;
    if (is_region_end(bytes.data() + bytes.size())) return false;
    const auto address = std::bit_cast<std::uintptr_t>(end);
    const auto is_own_memory = [](const mapping& each) {
        return each.readable && !each.shared && !each.of_file;
    };
    const auto last = std::ranges::upper_bound(mappings_, address - 1, {}, &mapping::end);
    if (last == mappings_.end() || !is_own_memory(*last)) return false;
    if (address < last->end) return true;
    // The last page of `bytes` is the last page of its mapping. Another array that begins in it also ends in
    // it, so all of that array is registered. Exception: the next mapping continues this one, because
    // mappings of one heap can differ, for example in MADV_HUGEPAGE.
    const auto next = std::next(last);
    return next != mappings_.end() && next->begin == address && is_own_memory(*next);
}

std::string read_own_maps() {
    return read_proc_text("/proc/self/maps");
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
