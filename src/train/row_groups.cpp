#include "src/train/row_groups.hpp"

#include <bit>
#include <cstddef>
#include <utility>

namespace pinflow::detail {

namespace {

/// The most bits of a digit: the write positions, one for each value of a digit, then stay in the cache.
constexpr unsigned max_digit_bits = 12;

}  // namespace

bool row_grouper::can_group(std::uint64_t id_count, std::uint64_t row_count) noexcept {
    return std::bit_width(id_count) + std::bit_width(row_count) <= 64;
}

/// Writes entries_ for `ids`, sorted by id.
void row_grouper::sort(std::span<const std::uint64_t> ids, std::uint64_t row_count, unsigned position_bits) {
    const auto bits = static_cast<unsigned>(std::bit_width(row_count - 1));
    const unsigned passes = (bits + max_digit_bits - 1) / max_digit_bits;
    const unsigned digit_bits = passes == 0 ? 0 : (bits + passes - 1) / passes;
    const std::size_t values = std::size_t{1} << digit_bits;
    const std::uint64_t mask = values - 1;
    entries_.resize(ids.size());
    others_.resize(ids.size());
    counts_.assign(passes * values, 0);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        entries_[i] = ids[i] << position_bits | i;
        for (unsigned pass = 0; pass < passes; ++pass)
            ++counts_[pass * values + (ids[i] >> (pass * digit_bits) & mask)];
    }
    for (unsigned pass = 0; pass < passes; ++pass) {
        const unsigned shift = position_bits + pass * digit_bits;
        const std::span<std::uint32_t> next(counts_.data() + pass * values, values);
        std::uint32_t sum = 0;
        for (std::uint32_t& count : next)
            sum += std::exchange(count, sum);
        for (const std::uint64_t entry : entries_)
            others_[next[entry >> shift & mask]++] = entry;
        std::swap(entries_, others_);
    }
}

std::uint64_t row_grouper::group(std::span<const std::uint64_t> ids, std::uint64_t row_count,
                                 const row_groups& to) {
    const auto position_bits = static_cast<unsigned>(std::bit_width(ids.size()));
    const std::uint64_t position_mask = (std::uint64_t{1} << position_bits) - 1;
    sort(ids, row_count, position_bits);
    std::uint64_t count = 0;  // of different ids
    std::uint64_t last = ~std::uint64_t{0};
    std::uint32_t start = 0;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
        const std::uint64_t id = entries_[i] >> position_bits;
        const bool is_first = id != last;
        last = id;
        count += is_first ? 1 : 0;
        start = is_first ? static_cast<std::uint32_t>(i) : start;
        // again for each position of an id: a branch would often be mispredicted
        to.ids[count - 1] = id;
        to.starts[count - 1] = start;
        const std::uint64_t position = entries_[i] & position_mask;
        to.positions[i] = static_cast<std::uint32_t>(position);
        to.groups[position] = static_cast<std::int64_t>(count - 1);
    }
    to.starts[count] = static_cast<std::uint32_t>(ids.size());
    return count;
}

}  // namespace pinflow::detail
