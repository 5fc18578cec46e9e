#include "src/train/row_groups.hpp"

#include <tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <utility>

#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

/// The maximum bits of a digit: the counts of its values then stay in the cache.
constexpr unsigned max_digit_bits = 12;
/// Fewer ids are not worth a thread.
constexpr std::size_t min_part_ids = 8192;
constexpr std::size_t max_parts = 8;

/// Calls work(part, begin, end) for each of `parts` parts of `count` elements, on up to as many threads.
template <typename Work>
void for_parts(std::size_t parts, std::size_t count, Work work) {
    const auto begin_of = [&](std::size_t part) { return count * part / parts; };
    if (parts == 1) return work(std::size_t{0}, std::size_t{0}, count);
    run_in_parallel(parts, [&](std::size_t part) { work(part, begin_of(part), begin_of(part + 1)); });
}

}  // namespace

/// Sorts entries_ by id. `counts_` has the counts of each part, one part after the other.
void row_grouper::sort(unsigned position_bits, std::uint64_t row_count, std::size_t parts) {
    const auto bits = static_cast<unsigned>(std::bit_width(row_count - 1));
    const unsigned passes = (bits + max_digit_bits - 1) / max_digit_bits;
    if (passes == 0) return;
    const unsigned digit_bits = (bits + passes - 1) / passes;
    const std::size_t values = std::size_t{1} << digit_bits;
    const std::uint64_t mask = values - 1;
    others_.resize(entries_.size());
    for (unsigned pass = 0; pass < passes; ++pass) {
        const unsigned shift = position_bits + pass * digit_bits;
        counts_.assign(parts * values, 0);
        for_parts(parts, entries_.size(), [&](std::size_t part, std::size_t begin, std::size_t end) {
            std::uint32_t* const counts = counts_.data() + part * values;
            for (std::size_t i = begin; i < end; ++i)
                ++counts[entries_[i] >> shift & mask];
        });
        std::uint32_t sum = 0;
        for (std::size_t value = 0; value < values; ++value) {
            for (std::size_t part = 0; part < parts; ++part)
                sum += std::exchange(counts_[part * values + value], sum);
        }
        for_parts(parts, entries_.size(), [&](std::size_t part, std::size_t begin, std::size_t end) {
            std::uint32_t* const next = counts_.data() + part * values;
            for (std::size_t i = begin; i < end; ++i)
                others_[next[entries_[i] >> shift & mask]++] = entries_[i];
        });
        std::swap(entries_, others_);
    }
}

bool row_grouper::can_group(std::uint64_t id_count, std::uint64_t row_count) noexcept {
    return std::bit_width(id_count) + std::bit_width(row_count) <= 64;
}

std::uint64_t row_grouper::group(std::span<const std::uint64_t> ids, std::uint64_t row_count,
                                 const row_groups& to) {
    const auto threads = static_cast<std::size_t>(tbb::this_task_arena::max_concurrency());
    const std::size_t parts =
        std::clamp<std::size_t>(ids.size() / min_part_ids, 1, std::min(threads, max_parts));
    const auto position_bits = static_cast<unsigned>(std::bit_width(ids.size()));
    entries_.resize(ids.size());
    for_parts(parts, ids.size(), [&](std::size_t, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            entries_[i] = ids[i] << position_bits | i;
    });
    sort(position_bits, row_count, parts);

    const auto is_first = [&](std::size_t i) {
        return i == 0 || entries_[i] >> position_bits != entries_[i - 1] >> position_bits;
    };
    std::array<std::uint64_t, max_parts> counts{};  // of different ids
    for_parts(parts, ids.size(), [&](std::size_t part, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            counts[part] += is_first(i) ? 1U : 0U;
    });
    std::uint64_t sum = 0;
    for (std::uint64_t& count : counts)
        sum += std::exchange(count, sum);
    const std::uint64_t position_mask = (std::uint64_t{1} << position_bits) - 1;
    for_parts(parts, ids.size(), [&](std::size_t part, std::size_t begin, std::size_t end) {
        std::uint64_t count = counts[part];
        for (std::size_t i = begin; i < end; ++i) {
            const std::uint64_t position = entries_[i] & position_mask;
            if (is_first(i)) {
                to.ids[count] = entries_[i] >> position_bits;
                to.starts[count] = static_cast<std::uint32_t>(i);
                ++count;
            }
            to.positions[i] = static_cast<std::uint32_t>(position);
            to.groups[position] = static_cast<std::int64_t>(count - 1);
        }
    });
    to.starts[sum] = static_cast<std::uint32_t>(ids.size());
    return sum;
}

}  // namespace pinflow::detail
