#include "src/core/scalar.hpp"
#include "src/device/cuda/row_words.cuh"
#include "src/device/cuda/rows.hpp"

// Scatters that add the rows of equal indices. Each group of threads has one row, or a piece of it, at a
// time, and each of its threads one value.

namespace pinflow::detail::cuda {

namespace {

/// The type that sums are computed in. 16-bit floats are added as floats; only the total is rounded to 16
/// bits.
template <typename Value>
struct accumulator {
    using type = Value;
    __device__ static type widen(Value value) { return value; }
    __device__ static Value narrow(type sum) { return sum; }
};
template <typename Value>
struct small_accumulator {
    using type = float;
    __device__ static type widen(Value value) { return widen_float(value); }
    __device__ static Value narrow(type sum) { return narrow_float<Value>(sum); }
};
template <>
struct accumulator<half_bits> : small_accumulator<half_bits> {};
template <>
struct accumulator<bfloat16_bits> : small_accumulator<bfloat16_bits> {};

/// Each row, or piece of a row, has a group of threads. The groups of the first of equal indices add up the
/// rows of all of them.
template <typename Value>
__global__ void __launch_bounds__(row_threads) scatter_sum(row_launch launch) {
    const row_transfer& work = launch.transfer;
    if (refused(work.errors)) return;
    using sum = accumulator<Value>;
    const row_order& order = work.order;
    const unsigned lane = threadIdx.x % launch.lanes;
    const std::uint64_t values = work.table.row_size_bytes / sizeof(Value);
    const unsigned pieces = launch.pieces_of_row;
    const std::uint64_t values_of_piece = pieces == 1 ? values : launch.piece_bytes / sizeof(Value);
    for (std::uint64_t piece = work.begin * pieces + thread_number() / launch.lanes;
         piece < work.end * pieces; piece += thread_count() / launch.lanes) {
        const std::uint64_t index = piece / pieces;
        const std::uint64_t first_value = piece % pieces * values_of_piece;
        const std::uint64_t end_value =
            first_value + values_of_piece < values ? first_value + values_of_piece : values;
        const bool repeated = is_repeated(order, index);
        // a compact table also has rows for repeated indices
        if (repeated && !work.compact) continue;
        const std::uint64_t id = order.ids[index];
        auto* const to = reinterpret_cast<Value*>(row_of_table(work, index));
        for (std::uint64_t at = first_value + lane; at < end_value; at += launch.lanes) {
            const auto value = [&](std::uint64_t i) {
                return reinterpret_cast<const Value*>(row_of_batch(work, position_of(order, i)))[at];
            };
            const Value first = value(index);
            if (repeated || !is_overwritten(order, index)) {
                to[at] = first;  // one value: its bits are kept
                continue;
            }
            typename sum::type total = sum::widen(first);
            for (std::uint64_t i = index + 1; i < order.count && order.ids[i] == id; ++i)
                total += sum::widen(value(i));
            to[at] = sum::narrow(total);
        }
    }
}

}  // namespace

const void* scatter_sums(sum_type type) {
    const auto address = [](void (*kernel)(row_launch)) { return reinterpret_cast<const void*>(kernel); };
    switch (type) {
        case sum_type::float16:
            return address(&scatter_sum<half_bits>);
        case sum_type::bfloat16:
            return address(&scatter_sum<bfloat16_bits>);
        case sum_type::float32:
            return address(&scatter_sum<float>);
        case sum_type::float64:
            return address(&scatter_sum<double>);
        case sum_type::int32:
            return address(&scatter_sum<unsigned>);  // sums that overflow wrap around
        case sum_type::int64:
            break;
    }
    return address(&scatter_sum<unsigned long long>);
}

}  // namespace pinflow::detail::cuda
