#include "src/core/scalar.hpp"
#include "src/device/cuda/records.hpp"

// Compiled with -fmad=false, so that the rules give the bits that the host gives. A warp works on one record
// at a time. All indices are 64 bits wide.

namespace pinflow::detail::cuda {

namespace {

constexpr unsigned warp_threads = 32;
/// What a thread updates at a time.
constexpr unsigned lane_elements = 4;

struct word {
    std::uint64_t low, high;
};

__device__ std::uint64_t warp_of_grid() {
    return (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / warp_threads;
}
__device__ std::uint64_t warps_of_grid() {
    return std::uint64_t{gridDim.x} * blockDim.x / warp_threads;
}
__device__ unsigned lane() {
    return threadIdx.x % warp_threads;
}

__global__ void __launch_bounds__(record_threads) patch_records(const __grid_constant__ record_patch work) {
    const std::uint64_t words = work.record_bytes / sizeof(word);
    const std::uint64_t count = *work.rows.count;
    const std::uint64_t newer_count = *work.newer.count;
    for (std::uint64_t row = warp_of_grid(); row < count; row += warps_of_grid()) {
        const std::uint64_t id = work.rows.ids[row];
        std::uint64_t first = 0;
        for (std::uint64_t left = newer_count; left > 0;) {
            const std::uint64_t half = left / 2;
            if (work.newer.ids[first + half] < id) {
                first += half + 1;
                left -= half + 1;
            } else {
                left = half;
            }
        }
        if (first == newer_count || work.newer.ids[first] != id) continue;
        const word* const from =
            reinterpret_cast<const word*>(work.newer.records + first * work.record_bytes);
        word* const to = reinterpret_cast<word*>(work.rows.records + row * work.record_bytes);
        for (std::uint64_t i = lane(); i < words; i += warp_threads)
            to[i] = from[i];
    }
}

/// Numbers that are loaded and stored at once.
template <typename T>
struct alignas(sizeof(T) * lane_elements) numbers_of_lane {
    T values[lane_elements];
};

/// The gradients of a row: those at positions[begin] ... positions[end - 1].
struct gradients_of_row {
    const std::byte* gradients;
    const std::uint32_t* positions;
    std::uint64_t columns;
    std::uint32_t begin, end;
    flat_type type;
    bool are_aligned;
};

/// The sum of a row's gradients at `count` columns from `column` on, in their order. Loads 16 gradients
/// before it adds them, to have several loads in flight.
template <typename Gradient>
__device__ numbers_of_lane<float> sum_of_type(const gradients_of_row& work, std::uint64_t column,
                                              unsigned count) {
    const Gradient* const gradients = reinterpret_cast<const Gradient*>(work.gradients);
    const auto load = [&](std::uint32_t i) {
        const Gradient* const from = gradients + std::uint64_t{work.positions[i]} * work.columns + column;
        if (work.are_aligned) return *reinterpret_cast<const numbers_of_lane<Gradient>*>(from);
        numbers_of_lane<Gradient> values{};
        for (unsigned e = 0; e < lane_elements; ++e) {
            if (e < count) values.values[e] = from[e];
        }
        return values;
    };
    numbers_of_lane<float> sums{};
    const auto add = [&](const numbers_of_lane<Gradient>& values) {
        for (unsigned e = 0; e < lane_elements; ++e)
            sums.values[e] += cast_scalar<float>(values.values[e]);
    };
    if (work.begin == work.end) return sums;
    const numbers_of_lane<Gradient> first = load(work.begin);
    for (unsigned e = 0; e < lane_elements; ++e)
        sums.values[e] = cast_scalar<float>(first.values[e]);  // not 0 + x, which would lose the sign of -0
    constexpr unsigned loaded_at_once = 16;
    std::uint32_t i = work.begin + 1;
    for (; work.end - i >= loaded_at_once; i += loaded_at_once) {
        numbers_of_lane<Gradient> values[loaded_at_once];
#pragma unroll
        for (unsigned k = 0; k < loaded_at_once; ++k)
            values[k] = load(i + k);
#pragma unroll
        for (unsigned k = 0; k < loaded_at_once; ++k)
            add(values[k]);
    }
    for (; i < work.end; ++i)
        add(load(i));
    return sums;
}

/// Not inlined: in every rule with every type of weights, it would be most of the code.
__device__ __noinline__ numbers_of_lane<float> sum_gradients(gradients_of_row work, std::uint64_t column,
                                                             unsigned count) {
    switch (work.type) {
        case flat_type::float16:
            return sum_of_type<half_bits>(work, column, count);
        case flat_type::bfloat16:
            return sum_of_type<bfloat16_bits>(work, column, count);
        default:
            return sum_of_type<float>(work, column, count);
    }
}

__device__ bool is_frequent(const record_update& work, std::uint64_t row) {
    return work.starts[row + 1] - work.starts[row] >= frequent_gradients;
}

__device__ float* sums_of(const record_update& work, std::uint64_t row) {
    return work.sums + work.starts[row] / frequent_gradients * work.layout.columns;
}

/// Sums the gradients of a frequent row, in their order. Called by all threads of a block: each has other
/// columns, and loads 64 gradients before it adds them. A warp of update_records has fewer loads in flight.
template <typename Gradient>
__device__ void sum_columns(const record_update& work, std::uint64_t row) {
    constexpr unsigned loaded_at_once = 2 * warp_threads;
    const std::uint64_t columns = work.layout.columns;
    const Gradient* const gradients = reinterpret_cast<const Gradient*>(work.gradients);
    const std::uint32_t begin = work.starts[row];
    const std::uint32_t end = work.starts[row + 1];
    for (std::uint64_t first = threadIdx.x / warp_threads * warp_threads; first < columns;
         first += blockDim.x) {
        // all lanes take part in the exchange of positions
        const std::uint64_t column = first + lane() < columns ? first + lane() : columns - 1;
        float sum = cast_scalar<float>(gradients[std::uint64_t{work.positions[begin]} * columns + column]);
        for (std::uint32_t i = begin + 1; i < end; i += loaded_at_once) {
            const std::uint32_t left = end - i;
            const std::uint32_t low = work.positions[lane() < left ? i + lane() : end - 1];
            const std::uint32_t high =
                work.positions[warp_threads + lane() < left ? i + warp_threads + lane() : end - 1];
            Gradient values[loaded_at_once];
#pragma unroll
            for (unsigned k = 0; k < loaded_at_once; ++k) {
                const std::uint32_t position =
                    __shfl_sync(~0U, k < warp_threads ? low : high, k % warp_threads);
                values[k] = gradients[std::uint64_t{position} * columns + column];
            }
#pragma unroll
            for (unsigned k = 0; k < loaded_at_once; ++k)
                sum = k < left ? sum + cast_scalar<float>(values[k]) : sum;
        }
        sums_of(work, row)[column] = sum;
    }
}

/// Sums the gradients of frequent rows. Neighbouring rows go to different blocks, because frequent ids are
/// often neighbours.
__global__ void __launch_bounds__(sum_threads) sum_frequent(const __grid_constant__ record_update work) {
    __shared__ std::uint64_t rows[sum_threads];
    __shared__ unsigned found;
    const std::uint64_t count = *work.rows.count;
    for (std::uint64_t first = blockIdx.x; first < count; first += std::uint64_t{gridDim.x} * sum_threads) {
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        const std::uint64_t own = first + std::uint64_t{threadIdx.x} * gridDim.x;
        if (own < count && is_frequent(work, own)) rows[atomicAdd(&found, 1U)] = own;
        __syncthreads();
        for (unsigned i = 0; i < found; ++i) {
            switch (work.gradient_type) {
                case flat_type::float16:
                    sum_columns<half_bits>(work, rows[i]);
                    break;
                case flat_type::bfloat16:
                    sum_columns<bfloat16_bits>(work, rows[i]);
                    break;
                default:
                    sum_columns<float>(work, rows[i]);
            }
        }
        __syncthreads();
    }
}

/// What a thread needs of some neighbouring columns.
template <typename Stored>
struct lane_columns {
    numbers_of_lane<Stored> weights;
    numbers_of_lane<float> gradients;
    unsigned count;
};

/// The weights and summed gradients at `column`. The padding of a part may be read and written: parts begin
/// at multiples of 16 bytes.
template <typename Stored>
__device__ lane_columns<Stored> load_columns(const gradients_of_row& gradients, const std::byte* record,
                                             std::uint64_t column) {
    lane_columns<Stored> columns{};
    const std::uint64_t left = gradients.columns - column;
    columns.count = left < lane_elements ? static_cast<unsigned>(left) : lane_elements;
    columns.gradients = sum_gradients(gradients, column, columns.count);
    columns.weights = reinterpret_cast<const numbers_of_lane<Stored>*>(record)[column / lane_elements];
    return columns;
}

/// Adds the squares of a row's gradients to its state, as record_work.hpp says. @return the new state, to all
/// lanes.
template <typename Rule, typename Stored>
__device__ float add_squares(const record_update& work, const gradients_of_row& gradients, std::byte* record,
                             const record_step<Rule>& now) {
    static_assert(square_sums == warp_threads && columns_of_turn == lane_elements);
    float total = 0;
    for (std::uint64_t column = std::uint64_t{lane()} * lane_elements; column < work.layout.columns;
         column += std::uint64_t{warp_threads} * lane_elements) {
        const auto columns = load_columns<Stored>(gradients, record, column);
        for (unsigned e = 0; e < columns.count; ++e) {
            float value = cast_scalar<float>(columns.weights.values[e]);
            float slope = columns.gradients.values[e];
            apply_decay(now.decay, value, slope);
            total += slope * slope;
        }
    }
    for (unsigned distance = warp_threads / 2; distance != 0; distance /= 2)
        total += __shfl_down_sync(~0U, total, distance);
    auto* const state = reinterpret_cast<float*>(record + work.layout.states_bytes[0]);
    float sum = 0;
    if (lane() == 0) {
        sum = Rule::add_mean_square(now.rule, *state, total, work.layout.columns);
        *state = sum;
    }
    return __shfl_sync(~0U, sum, 0);
}

template <typename Rule, typename Stored>
__device__ void update_record(const record_update& work, const gradients_of_row& gradients, std::byte* record,
                              const record_step<Rule>& now) {
    const record_layout& layout = work.layout;
    float row_state = 0;
    if constexpr (is_rowwise<Rule>) row_state = add_squares<Rule, Stored>(work, gradients, record, now);
    for (std::uint64_t column = std::uint64_t{lane()} * lane_elements; column < layout.columns;
         column += std::uint64_t{warp_threads} * lane_elements) {
        auto columns = load_columns<Stored>(gradients, record, column);
        const auto states_at = [&](unsigned k) {
            return reinterpret_cast<numbers_of_lane<float>*>(record + layout.states_bytes[k]) +
                   column / lane_elements;
        };
        numbers_of_lane<float> states[Rule::state_count + 1];
        for (unsigned k = 0; k != Rule::state_count && !is_rowwise<Rule>; ++k)
            states[k] = *states_at(k);
        for (unsigned e = 0; e < lane_elements; ++e) {
            if (e >= columns.count) continue;
            float value = cast_scalar<float>(columns.weights.values[e]);
            float slope = columns.gradients.values[e];
            float own[Rule::state_count + 1];
            for (unsigned k = 0; k != Rule::state_count; ++k)
                own[k] = is_rowwise<Rule> ? row_state : states[k].values[e];
            apply_decay(now.decay, value, slope);
            Rule::update(now.rule, value, slope, own);
            for (unsigned k = 0; k != Rule::state_count; ++k)
                states[k].values[e] = own[k];
            columns.weights.values[e] = cast_scalar<Stored>(value);
        }
        reinterpret_cast<numbers_of_lane<Stored>*>(record)[column / lane_elements] = columns.weights;
        for (unsigned k = 0; k != Rule::state_count && !is_rowwise<Rule>; ++k)
            *states_at(k) = states[k];
    }
}

template <typename Rule>
__global__ void __launch_bounds__(record_threads, 2)
    update_records(const __grid_constant__ record_update work) {
    const record_layout& layout = work.layout;
    const std::uint64_t gradient_bytes = work.gradient_type == flat_type::float32 ? 4 : 2;
    const std::uint64_t lane_bytes = lane_elements * gradient_bytes;
    const bool columns_are_aligned = layout.columns % lane_elements == 0;
    const bool gradients_are_aligned =
        columns_are_aligned && reinterpret_cast<std::uintptr_t>(work.gradients) % lane_bytes == 0;
    const std::uint64_t count = *work.rows.count;
    for (std::uint64_t row = warp_of_grid(); row < count; row += warps_of_grid()) {
        std::byte* const record = work.rows.records + row * layout.size_bytes;
        gradients_of_row gradients{work.gradients,       work.positions,       layout.columns,
                                   work.starts[row],     work.starts[row + 1], work.gradient_type,
                                   gradients_are_aligned};
        if (is_frequent(work, row)) {
            const std::uint32_t* const zero = work.starts;  // the first row begins at position 0
            gradients = {reinterpret_cast<const std::byte*>(sums_of(work, row)),
                         zero,
                         layout.columns,
                         0,
                         1,
                         flat_type::float32,
                         columns_are_aligned};
        }
        auto* const steps = reinterpret_cast<std::uint32_t*>(record + layout.steps_bytes);
        const std::uint32_t number = *steps + 1;
        const record_step<Rule> now{Rule::template prepare<float>(*work.numbers, number),
                                    prepare_decay<float>(*work.numbers)};
        switch (layout.type) {
            case flat_type::float16:
                update_record<Rule, half_bits>(work, gradients, record, now);
                break;
            case flat_type::bfloat16:
                update_record<Rule, bfloat16_bits>(work, gradients, record, now);
                break;
            default:
                update_record<Rule, float>(work, gradients, record, now);
        }
        __syncwarp();
        if (lane() == 0) *steps = number;
    }
}

}  // namespace

const void* patch_records_kernel() {
    return reinterpret_cast<const void*>(&patch_records);
}

const void* sum_frequent_kernel() {
    return reinterpret_cast<const void*>(&sum_frequent);
}

const void* update_records_kernel(rule_kind rule) {
    return visit_rule(
        rule, [](auto chosen) { return reinterpret_cast<const void*>(&update_records<decltype(chosen)>); });
}

}  // namespace pinflow::detail::cuda
