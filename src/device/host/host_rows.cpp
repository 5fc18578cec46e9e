#include "src/device/host/host_rows.hpp"

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "src/core/scalar.hpp"

namespace pinflow::detail::host_rows {

namespace {

/// The number of bytes that one task moves.
constexpr std::uint64_t bytes_of_task = 64 << 10;

bool refused(const index_errors* errors) {
    return errors != nullptr && (errors->outside_count != 0 || errors->repeated_count != 0);
}

/// The positions of wrong indices. Thread-safe.
class wrong_positions {
 public:
    void add(std::uint64_t position) {
        ++count_;
        std::uint64_t known = lowest_;
        while (position < known && !lowest_.compare_exchange_weak(known, position)) {
        }
    }
    std::uint64_t count() const { return count_; }
    std::uint64_t lowest() const { return lowest_; }

 private:
    std::atomic<std::uint64_t> count_ = 0;
    std::atomic<std::uint64_t> lowest_ = ~std::uint64_t{0};
};

std::uint64_t position_of(const row_order& order, std::uint64_t index) {
    return order.positions == nullptr ? index : order.positions[index];
}
bool is_repeated(const row_order& order, std::uint64_t index) {
    return order.sorted && index > 0 && order.ids[index - 1] == order.ids[index];
}
bool is_overwritten(const row_order& order, std::uint64_t index) {
    return order.sorted && index + 1 < order.count && order.ids[index + 1] == order.ids[index];
}

std::byte* row_of_batch(const row_transfer& work, std::uint64_t position) {
    unsigned part = 0;
    while (part + 1 < work.parts.count && position >= work.parts.first[part + 1])
        ++part;
    return work.parts.rows[part] + (position - work.parts.first[part]) * work.table.row_size_bytes;
}

std::byte* row_of_table(const row_transfer& work, std::uint64_t index) {
    if (work.table.by_address) return reinterpret_cast<std::byte*>(work.order.ids[index]);
    const std::uint64_t row = work.compact ? index - work.begin : work.order.ids[index] - work.table.first_id;
    return work.table.rows + row * work.table.row_size_bytes;
}

/// Calls `move(index)` for all indices of a transfer, in parallel.
template <typename Move>
void for_each_index(const row_transfer& work, Move move) {
    if (refused(work.errors) || work.table.row_size_bytes == 0) return;
    const std::uint64_t grain = std::max<std::uint64_t>(bytes_of_task / work.table.row_size_bytes, 1);
    const row_range moved = work.range == nullptr ? row_range{work.begin, work.end} : *work.range;
    tbb::parallel_for(tbb::blocked_range<std::uint64_t>(moved.begin, moved.end, grain),
                      [&](const tbb::blocked_range<std::uint64_t>& range) {
                          for (std::uint64_t index = range.begin(); index != range.end(); ++index)
                              move(index);
                      });
}

/// Writes to the table the sum of all rows that have the same index as the one at `index`, in their order.
template <typename Value, typename Sum, typename Widen, typename Narrow>
void sum_rows(const row_transfer& work, std::uint64_t index, Widen widen, Narrow narrow) {
    const std::uint64_t size_bytes = work.table.row_size_bytes;
    std::byte* const to = row_of_table(work, index);
    const std::byte* const first = row_of_batch(work, position_of(work.order, index));
    if (!is_overwritten(work.order, index)) {
        std::memcpy(to, first, size_bytes);
        return;
    }
    const auto value = [](const std::byte* row, std::uint64_t at) {
        Value read{};
        std::memcpy(&read, row + at * sizeof(Value), sizeof(Value));
        return read;
    };
    for (std::uint64_t at = 0; at < size_bytes / sizeof(Value); ++at) {
        Sum total = widen(value(first, at));
        for (std::uint64_t i = index; is_overwritten(work.order, i); ++i)
            total = static_cast<Sum>(total +
                                     widen(value(row_of_batch(work, position_of(work.order, i + 1)), at)));
        const Value sum = narrow(total);
        std::memcpy(to + at * sizeof(Value), &sum, sizeof(Value));
    }
}

/// Scatters indices in their order, so that of equal ones the last row is written last. Each task looks at
/// all indices, and writes the rows of some blocks of the table.
void scatter_in_batch_order(const row_transfer& work) {
    constexpr std::uint64_t max_tasks = 8;
    constexpr std::uint64_t cache_line_bytes = 64;
    if (refused(work.errors) || work.table.row_size_bytes == 0) return;
    const row_range moved = work.range == nullptr ? row_range{work.begin, work.end} : *work.range;
    const std::uint64_t wanted = (moved.end - moved.begin) * work.table.row_size_bytes / bytes_of_task;
    const auto cores = static_cast<std::uint64_t>(tbb::this_task_arena::max_concurrency());
    const std::uint64_t tasks =
        std::bit_floor(std::clamp<std::uint64_t>(std::min(wanted, cores), 1, max_tasks));
    // rows that share a cache line belong to one task
    const unsigned block_bits =
        static_cast<unsigned>(std::bit_width(cache_line_bytes / work.table.row_size_bytes));
    const auto task_of = [=](std::uint64_t id) {
        constexpr std::uint64_t spread =
            0x9E37'79B9'7F4A'7C15;  // 2^64 / golden ratio: also ids with a stride differ
        return ((id >> block_bits) * spread >> 32) & (tasks - 1);
    };
    const auto write = [&](std::uint64_t task) {
        for (std::uint64_t index = moved.begin; index != moved.end; ++index) {
            if (task_of(work.order.ids[index]) != task) continue;
            std::memcpy(row_of_table(work, index), row_of_batch(work, position_of(work.order, index)),
                        work.table.row_size_bytes);
        }
    };
    if (tasks == 1) return write(0);
    tbb::parallel_for(std::uint64_t{0}, tasks, write);
}

template <typename Value>
void sum_plain(const row_transfer& work, std::uint64_t index) {
    const auto same = [](Value value) { return value; };
    sum_rows<Value, Value>(work, index, same, same);
}

template <typename Value>
void sum_small(const row_transfer& work, std::uint64_t index) {
    sum_rows<Value, float>(
        work, index, [](Value value) { return widen_float(value); },
        [](float sum) { return narrow_float<Value>(sum); });
}

void sum_into(const row_transfer& work, std::uint64_t index, sum_type type) {
    switch (type) {
        case sum_type::float16:
            return sum_small<half_bits>(work, index);
        case sum_type::bfloat16:
            return sum_small<bfloat16_bits>(work, index);
        case sum_type::float32:
            return sum_plain<float>(work, index);
        case sum_type::float64:
            return sum_plain<double>(work, index);
        case sum_type::int32:
            return sum_plain<std::uint32_t>(work, index);
        case sum_type::int64:
            return sum_plain<std::uint64_t>(work, index);
    }
}

void sort_by_comparison(const row_sort& sort) {
    const std::uint64_t* const ids = sort.ids;
    for (std::uint64_t i = 0; i < sort.count; ++i)
        sort.positions[i] = static_cast<std::uint32_t>(i);
    std::sort(sort.positions, sort.positions + sort.count,
              [=](std::uint32_t a, std::uint32_t b) { return ids[a] != ids[b] ? ids[a] < ids[b] : a < b; });
    for (std::uint64_t i = 0; i < sort.count; ++i)
        sort.sorted_ids[i] = ids[sort.positions[i]];
}

/// A stable sort, digit by digit from the lowest one, of the distances to the smallest index.
void sort_by_digits(const row_sort& sort) {
    constexpr unsigned digit_bits = 11;
    constexpr std::uint64_t digit_mask = (1 << digit_bits) - 1;
    struct indices {
        std::uint64_t* ids;
        std::uint32_t* positions;
    };
    const auto [smallest, largest] = std::minmax_element(sort.ids, sort.ids + sort.count);
    const std::uint64_t base = *smallest;
    const auto bits = static_cast<unsigned>(std::bit_width(*largest - base));
    const unsigned passes = std::max((bits + digit_bits - 1) / digit_bits, 1U);
    auto* const scratch_ids = reinterpret_cast<std::uint64_t*>(sort.scratch);
    indices to{sort.sorted_ids, sort.positions};
    indices other{scratch_ids, reinterpret_cast<std::uint32_t*>(scratch_ids + sort.count)};
    if (passes % 2 == 0) std::swap(to, other);
    for (unsigned pass = 0; pass < passes; ++pass) {
        const bool is_first = pass == 0;
        const std::uint64_t* const ids = is_first ? sort.ids : other.ids;
        const auto digit_of = [=](std::uint64_t id) {
            return (id - base) >> (pass * digit_bits) & digit_mask;
        };
        std::array<std::uint32_t, digit_mask + 1> next{};  // where the next index with this digit goes
        for (std::uint64_t i = 0; i < sort.count; ++i)
            ++next[digit_of(ids[i])];
        std::exclusive_scan(next.begin(), next.end(), next.begin(), std::uint32_t{0});
        for (std::uint64_t i = 0; i < sort.count; ++i) {
            const std::uint32_t place = next[digit_of(ids[i])]++;
            to.ids[place] = ids[i];
            to.positions[place] = is_first ? static_cast<std::uint32_t>(i) : other.positions[i];
        }
        std::swap(to, other);
    }
}

}  // namespace

void check(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
           const error_memory& errors) {
    wrong_positions outside;
    tbb::parallel_for(std::uint64_t{0}, count, [&](std::uint64_t i) {
        if (ids[i] >= row_count) outside.add(i);
    });
    *errors.found = {};
    if (outside.count() == 0) return;
    errors.found->outside_count = outside.count();
    errors.found->outside_position = outside.lowest();
    errors.found->outside_id = ids[outside.lowest()];
    *errors.report = *errors.found;
}

std::uint64_t sort_scratch_bytes(std::uint64_t count) noexcept {
    return count * (sizeof(std::uint64_t) + sizeof(std::uint32_t));
}

void sort(const row_sort& sort) {
    constexpr std::uint64_t min_digit_sort_count = 512;  // shorter lists are sorted faster by comparison
    if (sort.count < min_digit_sort_count) {
        sort_by_comparison(sort);
    } else {
        sort_by_digits(sort);
    }
    if (sort.errors.found != nullptr) check(sort.ids, sort.count, sort.row_count, sort.errors);
}

void refuse_repeated(const row_order& order, const std::uint64_t* ids, const error_memory& errors) {
    wrong_positions repeated;
    tbb::parallel_for(std::uint64_t{0}, order.count, [&](std::uint64_t i) {
        if (is_repeated(order, i)) repeated.add(position_of(order, i));
    });
    if (repeated.count() == 0) return;
    errors.found->repeated_count = repeated.count();
    errors.found->repeated_position = repeated.lowest();
    errors.found->repeated_id = ids[repeated.lowest()];
    *errors.report = *errors.found;
}

void group(const row_grouping& grouping) {
    const row_order& sorted = grouping.sorted;
    const std::uint64_t count = refused(grouping.errors) ? 0 : sorted.count;
    if (count == 0) std::fill_n(grouping.groups, sorted.count, 0);
    std::uint64_t found = 0;
    std::uint64_t below = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t id = sorted.ids[i];
        if (!is_repeated(sorted, i)) {
            grouping.ids[found] = id;
            grouping.starts[found] = static_cast<std::uint32_t>(i);
            ++found;
            below += id < grouping.split_id ? 1 : 0;
        }
        grouping.groups[sorted.positions[i]] = static_cast<std::int64_t>(found - 1);
    }
    grouping.starts[found] = static_cast<std::uint32_t>(count);
    *grouping.id_count = found;
    *grouping.reported_count = found;
    grouping.ranges[0] = {0, below};
    grouping.ranges[1] = {below, found};
}

void gather(const row_transfer& transfer) {
    if (transfer.report != nullptr) {
        index_errors found;
        check(transfer.order.ids, transfer.order.count, transfer.table.row_count,
              {&found, transfer.report, nullptr});
        if (found.outside_count != 0) return;
    }
    for_each_index(transfer, [&](std::uint64_t index) {
        if (is_repeated(transfer.order, index)) return;
        std::memcpy(row_of_batch(transfer, position_of(transfer.order, index)), row_of_table(transfer, index),
                    transfer.table.row_size_bytes);
    });
}

void gather_held(const held_gather& gather) {
    for (const held_table& table : std::span(gather.tables, gather.table_count)) {
        for (unsigned part = 0; part < gather.parts.count; ++part) {
            const std::uint64_t first = gather.parts.first[part];
            for (std::uint64_t i = first; i < gather.parts.first[part + 1]; ++i) {
                std::memcpy(gather.parts.rows[part] + table.offset_bytes + (i - first) * table.row_size_bytes,
                            table.rows + gather.ids[i] * table.row_size_bytes, table.row_size_bytes);
            }
        }
    }
}

void repeat(const row_transfer& transfer) {
    const std::span ids(transfer.order.ids, transfer.order.count);
    for_each_index(transfer, [&](std::uint64_t index) {
        if (!is_repeated(transfer.order, index)) return;
        const auto first =
            static_cast<std::uint64_t>(std::ranges::lower_bound(ids, ids[index]) - ids.begin());
        std::memcpy(row_of_batch(transfer, position_of(transfer.order, index)),
                    row_of_batch(transfer, position_of(transfer.order, first)),
                    transfer.table.row_size_bytes);
    });
}

void scatter(const row_transfer& transfer, repeated_rows repeated, sum_type type) {
    const bool may_repeat = !transfer.order.sorted && !transfer.compact && !transfer.table.by_address;
    if (may_repeat && repeated == repeated_rows::last) return scatter_in_batch_order(transfer);
    for_each_index(transfer, [&](std::uint64_t index) {
        if (repeated == repeated_rows::sum) {
            if (!is_repeated(transfer.order, index)) sum_into(transfer, index, type);
            return;
        }
        if (is_overwritten(transfer.order, index)) return;
        std::memcpy(row_of_table(transfer, index), row_of_batch(transfer, position_of(transfer.order, index)),
                    transfer.table.row_size_bytes);
    });
}

}  // namespace pinflow::detail::host_rows
