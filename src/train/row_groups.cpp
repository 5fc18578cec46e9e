#include "src/train/row_groups.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace pinflow::detail {

namespace {

/// Bits of a digit: the counts of its values stay in the cache.
constexpr unsigned max_digit_bits = 12;

}  // namespace

void row_grouper::sort(std::uint64_t row_count) {
    const auto bits = static_cast<unsigned>(std::bit_width(row_count - 1));
    const unsigned passes = (bits + max_digit_bits - 1) / max_digit_bits;
    if (passes == 0) return;
    const unsigned digit_bits = (bits + passes - 1) / passes;
    const std::uint64_t mask = (std::uint64_t{1} << digit_bits) - 1;
    others_.resize(entries_.size());
    for (unsigned pass = 0; pass < passes; ++pass) {
        const unsigned shift = pass * digit_bits;
        counts_.assign(mask + 1, 0);
        for (const entry& each : entries_)
            ++counts_[each.id >> shift & mask];
        std::uint32_t end = 0;
        for (std::uint32_t& count : counts_)
            end += std::exchange(count, end);
        for (const entry& each : entries_)
            others_[counts_[each.id >> shift & mask]++] = each;
        std::swap(entries_, others_);
    }
}

std::uint64_t row_grouper::group(std::span<const std::uint64_t> ids, std::uint64_t row_count,
                                 const row_groups& to) {
    entries_.resize(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i)
        entries_[i] = {ids[i], static_cast<std::uint32_t>(i)};
    sort(row_count);
    std::uint64_t count = 0;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
        const entry& each = entries_[i];
        if (i == 0 || each.id != to.ids[count - 1]) {
            to.ids[count] = each.id;
            to.starts[count] = static_cast<std::uint32_t>(i);
            ++count;
        }
        to.positions[i] = each.position;
        to.groups[each.position] = static_cast<std::int64_t>(count - 1);
    }
    to.starts[count] = static_cast<std::uint32_t>(entries_.size());
    return count;
}

}  // namespace pinflow::detail
