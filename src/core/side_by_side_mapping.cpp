#include "src/core/side_by_side_mapping.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/proc_text.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

std::optional<std::uint64_t> max_mappings_of_tests;

// ---- the mappings of this process -------------------------------------------------------------------------

std::atomic<std::uint64_t> mappings_in_use = 0;

/// @return how many of the `wanted` mappings are allowed.
std::uint64_t take_mappings(std::uint64_t wanted) {
    const std::uint64_t max_count = max_side_by_side_mappings();
    std::uint64_t used = mappings_in_use;
    std::uint64_t taken = 0;
    do {
        taken = std::min(wanted, max_count - std::min(used, max_count));
    } while (!mappings_in_use.compare_exchange_weak(used, used + taken));
    return taken;
}

void give_mappings_back(std::uint64_t count) noexcept {
    mappings_in_use -= count;
}

// ---- parts ------------------------------------------------------------------------------------------------

std::string attempt(const file_part& part) {
    return fmt::format("cannot map {} bytes at offset {} of '{}'", part.end_bytes - part.begin_bytes,
                       part.begin_bytes, part.file->path());
}

/// The pages of a file that hold a part of it.
struct page_range {
    std::uint64_t offset_bytes;
    std::uint64_t size_bytes;
};

page_range pages_of(const file_part& part, std::uint64_t page_bytes) {
    const std::uint64_t offset_bytes = part.begin_bytes - part.begin_bytes % page_bytes;
    const std::uint64_t end_bytes = rounded_up(part.end_bytes, page_bytes);
    return {offset_bytes, end_bytes - offset_bytes};
}

/// The descriptor of a part, after checking that the file is long enough: pages past its end could be mapped,
/// but not touched.
descriptor_lease lease_long_enough(const file_part& part) {
    descriptor_lease lease = part.file->lease_descriptor();
    const auto size_bytes =
        static_cast<std::uint64_t>(system::status(lease.get(), part.file->path()).st_size);
    if (size_bytes < part.end_bytes) {
        throw data_changed(fmt::format("{}: the file has {} bytes now, it had {} when it was opened",
                                       attempt(part), size_bytes, part.file->size_bytes()));
    }
    return lease;
}

}  // namespace

// ---- the mapping ------------------------------------------------------------------------------------------

struct side_by_side_mapping::pages {
    pages() = default;
    pages(const pages&) = delete;
    pages& operator=(const pages&) = delete;
    ~pages() {
        if (size_bytes > 0) system::unmap(data, size_bytes);
        give_mappings_back(mappings);
    }

    /// Gives up all addresses from `kept_bytes` on, after a part of `lost_bytes` could not be mapped over
    /// them. It is unknown whether the addresses of that part are still reserved. They may belong to another
    /// mapping by now, so they are never unmapped.
    void cut_off(std::uint64_t kept_bytes, std::uint64_t lost_bytes, std::uint64_t kept_mappings) noexcept {
        const std::uint64_t rest_bytes = size_bytes - kept_bytes - lost_bytes;
        if (rest_bytes > 0) system::unmap(data + kept_bytes + lost_bytes, rest_bytes);
        size_bytes = kept_bytes;
        give_mappings_back(mappings - kept_mappings);
        mappings = kept_mappings;
    }

    std::byte* data = nullptr;
    std::uint64_t size_bytes = 0;
    std::uint64_t mappings = 0;
};

side_by_side_mapping::side_by_side_mapping() noexcept = default;
side_by_side_mapping::side_by_side_mapping(side_by_side_mapping&&) noexcept = default;
side_by_side_mapping& side_by_side_mapping::operator=(side_by_side_mapping&&) noexcept = default;
side_by_side_mapping::~side_by_side_mapping() = default;

side_by_side_mapping::side_by_side_mapping(std::span<const file_part> parts)
    : pages_(std::make_unique<pages>()), data_(parts.size()) {
    for (const file_part& part : parts) {
        if (part.end_bytes > part.file->size_bytes()) {
            throw format_error(
                fmt::format("{}: the file has {} bytes", attempt(part), part.file->size_bytes()));
        }
    }
    const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    pages_->mappings = take_mappings(parts.size());
    const auto granted = parts.first(static_cast<std::size_t>(pages_->mappings));
    std::uint64_t size_bytes = 0;
    for (const file_part& part : granted)
        size_bytes = saturated(1, size_bytes, pages_of(part, page_bytes).size_bytes);
    if (size_bytes == 0) return;
    try {
        pages_->data = system::reserve_addresses(size_bytes);
    } catch (const system_failure&) {
        pages_->cut_off(0, 0, 0);
        return;
    }
    pages_->size_bytes = size_bytes;

    std::uint64_t mapped_bytes = 0;
    for (std::size_t index = 0; index < granted.size(); ++index) {
        const file_part& part = granted[index];
        const page_range range = pages_of(part, page_bytes);
        std::byte* const address = pages_->data + mapped_bytes;
        const descriptor_lease lease = lease_long_enough(part);
        try {
            system::map_over(address, range.size_bytes, lease.get(), part.file->path(), range.offset_bytes);
        } catch (const system_failure&) {
            pages_->cut_off(mapped_bytes, range.size_bytes, index);
            return;
        }
        data_[index] = address + (part.begin_bytes - range.offset_bytes);
        mapped_bytes += range.size_bytes;
    }
}

std::uint64_t max_side_by_side_mappings() {
    if (max_mappings_of_tests) return *max_mappings_of_tests;
    constexpr std::uint64_t default_count = 65'530;
    return parse_number(read_proc_text("/proc/sys/vm/max_map_count")).value_or(default_count) / 2;
}

scoped_mapping_limit::scoped_mapping_limit(std::uint64_t max_mappings) {
    max_mappings_of_tests = max_mappings;
}

scoped_mapping_limit::~scoped_mapping_limit() {
    max_mappings_of_tests.reset();
}

}  // namespace pinflow::detail
