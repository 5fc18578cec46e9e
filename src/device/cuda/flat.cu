#include "src/core/scalar.hpp"
#include "src/device/cuda/flat.hpp"

// Compiled with -fmad=false, so that the rules give the bits that the host gives. The kernels are
// memory-bound: a thread loads the packs of all buffers before it computes. All indices are 64 bits wide.

namespace pinflow::detail::cuda {

namespace {

/// pack_elements numbers that are loaded and stored at once, in one or two words of 16 bytes (8 for 16-bit
/// types).
template <typename T>
struct alignas(sizeof(T) * pack_elements > 16 ? 16 : sizeof(T) * pack_elements) pack {
    T values[pack_elements];
};

template <typename T>
__device__ pack<T>* packs_at(std::byte* buffer, std::uint64_t offset_bytes) {
    return reinterpret_cast<pack<T>*>(buffer + offset_bytes);
}
template <typename T>
__device__ const pack<T>* packs_at(const std::byte* buffer, std::uint64_t offset_bytes) {
    return reinterpret_cast<const pack<T>*>(buffer + offset_bytes);
}

__device__ const flat_segment& segment_at(const flat_buffers& buffers, std::uint32_t index) {
    return index < flat_buffers::max_near_segments ? buffers.near_segments[index] : buffers.segments[index];
}

/// Whether the calling block is the last one of its kernel to get here. All threads must call it.
__device__ bool is_last_block(flat_control& control) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&control.finished_blocks, 1U) + 1 == gridDim.x;
    __syncthreads();
    return last;
}

// ---- a step ----------------------------------------------------------------------------------------------

/// What a thread reads and writes of each buffer at a time.
template <typename Rule, typename Stored, typename Real>
struct element_packs {
    pack<Stored> parameter;
    pack<Stored> gradient;
    pack<Real> states[Rule::state_count + 1];  ///< the last one is the master copy
};

/// What the threads of a block share in a step.
template <typename Rule, typename Real>
struct block_step {
    typename Rule::template step<Real> rule;
    decay_step<Real> decay;
    gradient_change<Real> change;
    bool skipped;
};

template <typename Rule, typename Real>
__device__ __noinline__ void prepare_block(const flat_step& work, const flat_segment& segment,
                                           block_step<Rule, Real>& step) {
    const rule_numbers& numbers = work.buffers.groups[segment.group];
    const std::uint64_t number = work.buffers.control->steps + 1;
    step.rule = Rule::template prepare<Real>(numbers, number);
    step.decay = prepare_decay<Real>(numbers);
    step.change = prepare_change<Real>(work, factor_of(work.buffers));
    step.skipped = skips_step(work);
}

/// Updates this thread's packs of one segment: from pack `at` on, every `stride`-th. Returns the first one
/// behind the segment.
template <typename Rule, typename Stored, typename Real>
__device__ std::uint64_t update_segment(const flat_step& work, const flat_segment& segment, std::uint64_t at,
                                        std::uint64_t stride) {
    constexpr unsigned states = Rule::state_count;
    const flat_buffers& buffers = work.buffers;
    pack<Stored>* const parameters = packs_at<Stored>(buffers.parameters, segment.parameter_bytes);
    const pack<Stored>* const gradients = packs_at<Stored>(buffers.gradients, segment.parameter_bytes);
    pack<Real>* state_packs[states + 1];
    for (unsigned k = 0; k <= states; ++k)
        state_packs[k] = packs_at<Real>(buffers.states[k], segment.state_bytes);
    const bool has_master = sizeof(Stored) == 2 && buffers.has_masters;
    const std::uint64_t end_pack = segment.end_pack;
    const std::uint64_t begin_pack = segment.begin_pack;
    const auto load = [&](std::uint64_t i) {
        element_packs<Rule, Stored, Real> packs;
        packs.gradient = gradients[i];
        packs.parameter = parameters[i];
        for (unsigned k = 0; k != states; ++k)
            packs.states[k] = state_packs[k][i];
        if (has_master) packs.states[states] = state_packs[states][i];
        return packs;
    };

    // While one thread prepares what the group's step needs, the first packs arrive.
    alignas(16) __shared__ unsigned char memory[sizeof(block_step<Rule, Real>)];
    auto& shared = *reinterpret_cast<block_step<Rule, Real>*>(memory);
    element_packs<Rule, Stored, Real> packs;
    if (at < end_pack) packs = load(at - begin_pack);
    __syncthreads();  // all threads are done with the last segment
    if (threadIdx.x == 0) prepare_block(work, segment, shared);
    __syncthreads();
    const block_step<Rule, Real> now = shared;

    while (!now.skipped && at < end_pack) {
        const std::uint64_t i = at - begin_pack;
        for (unsigned e = 0; e < pack_elements; ++e) {
            Real value = 0;
            if constexpr (sizeof(Stored) == 2) {
                value = has_master ? value_of(packs.parameter.values[e], packs.states[states].values[e])
                                   : cast_scalar<Real>(packs.parameter.values[e]);
            } else {
                value = cast_scalar<Real>(packs.parameter.values[e]);
            }
            Real slope = apply_change(now.change, cast_scalar<Real>(packs.gradient.values[e]));
            Real own[states + 1];
            for (unsigned k = 0; k != states; ++k)
                own[k] = packs.states[k].values[e];
            apply_decay(now.decay, value, slope);
            Rule::update(now.rule, value, slope, own);
            for (unsigned k = 0; k != states; ++k)
                packs.states[k].values[e] = own[k];
            packs.states[states].values[e] = value;
            packs.parameter.values[e] = cast_scalar<Stored>(value);
        }
        for (unsigned k = 0; k != states; ++k)
            state_packs[k][i] = packs.states[k];
        if (has_master) state_packs[states][i] = packs.states[states];
        parameters[i] = packs.parameter;
        at += stride;
        if (at < end_pack) packs = load(at - begin_pack);
    }
    // the first one behind the segment, also if the step is skipped
    return at < end_pack ? at + (end_pack - at + stride - 1) / stride * stride : at;
}

/// Doubles: whether there are float64 parameters, whose arithmetic takes twice the registers.
template <typename Rule, bool Doubles>
__global__ void __launch_bounds__(update_threads, update_blocks(Doubles))
    update_parameters(const __grid_constant__ flat_step work) {
    const flat_buffers& buffers = work.buffers;
    flat_control& control = *buffers.control;
    const std::uint64_t stride = std::uint64_t{gridDim.x} * update_threads;
    std::uint64_t at = std::uint64_t{blockIdx.x} * update_threads + threadIdx.x;
    for (std::uint32_t i = 0; i < buffers.segment_count; ++i) {
        const flat_segment& segment = segment_at(buffers, i);
        switch (segment.type) {
            case flat_type::float16:
                at = update_segment<Rule, half_bits, float>(work, segment, at, stride);
                break;
            case flat_type::bfloat16:
                at = update_segment<Rule, bfloat16_bits, float>(work, segment, at, stride);
                break;
            case flat_type::float32:
                at = update_segment<Rule, float, float>(work, segment, at, stride);
                break;
            case flat_type::float64:
                if constexpr (Doubles) at = update_segment<Rule, double, double>(work, segment, at, stride);
                break;
        }
    }
    if (is_last_block(control) && threadIdx.x == 0) {
        finish_step(skips_step(work), control);
        control.finished_blocks = 0;
    }
}

// ---- the check of the gradients --------------------------------------------------------------------------

/// Adds up the sums of all threads of a block in the order that flat_work.hpp gives; the result is thread
/// 0's.
__device__ double sum_of_threads(const double (&sums)[pack_elements]) {
    __shared__ double totals[norm_threads];
    __syncthreads();
    totals[threadIdx.x] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (unsigned distance = norm_threads / 2; distance != 0; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance) totals[threadIdx.x] += totals[threadIdx.x + distance];
    }
    return totals[0];
}

template <typename Stored, typename Real>
__device__ bool add_squares(const flat_buffers& buffers, const flat_segment& segment, std::uint64_t at,
                            std::uint64_t end, double (&sums)[pack_elements]) {
    const pack<Stored>* const gradients = packs_at<Stored>(buffers.gradients, segment.parameter_bytes);
    Real worst = 0;
#pragma unroll 4
    for (; at < end; at += norm_threads) {
        const pack<Stored> gradient = gradients[at - segment.begin_pack];
        for (unsigned e = 0; e < pack_elements; ++e) {
            const Real value = cast_scalar<Real>(gradient.values[e]);
            worst += value * 0;
            sums[e] += static_cast<double>(value) * static_cast<double>(value);
        }
    }
    return worst == 0;
}

__global__ void __launch_bounds__(norm_threads) check_gradients(const __grid_constant__ gradient_check work) {
    const flat_buffers& buffers = work.buffers;
    flat_control& control = *buffers.control;
    const std::uint64_t chunks = norm_sum_count(buffers.pack_count);
    bool finite = true;
    for (std::uint64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        double sums[pack_elements] = {};
        const std::uint64_t begin = chunk * packs_of_chunk;
        const std::uint64_t end =
            begin + packs_of_chunk < buffers.pack_count ? begin + packs_of_chunk : buffers.pack_count;
        for (std::uint32_t i = 0; i < buffers.segment_count; ++i) {
            const flat_segment& segment = segment_at(buffers, i);
            if (segment.end_pack <= begin || segment.begin_pack >= end) continue;
            // this thread's first pack in the segment: packs are assigned to threads in turn, from the start
            // of the chunk
            std::uint64_t at = begin + threadIdx.x;
            if (segment.begin_pack > at) {
                const std::uint64_t missing = segment.begin_pack - at;
                at += (missing + norm_threads - 1) / norm_threads * norm_threads;
            }
            const std::uint64_t stop = segment.end_pack < end ? segment.end_pack : end;
            switch (segment.type) {
                case flat_type::float16:
                    finite = add_squares<half_bits, float>(buffers, segment, at, stop, sums) && finite;
                    break;
                case flat_type::bfloat16:
                    finite = add_squares<bfloat16_bits, float>(buffers, segment, at, stop, sums) && finite;
                    break;
                case flat_type::float32:
                    finite = add_squares<float, float>(buffers, segment, at, stop, sums) && finite;
                    break;
                case flat_type::float64:
                    finite = add_squares<double, double>(buffers, segment, at, stop, sums) && finite;
                    break;
            }
        }
        const double sum = sum_of_threads(sums);
        if (threadIdx.x == 0) buffers.sums[chunk] = sum;
    }
    // only threads that found a gradient that is not finite use an atomic
    if (!finite) atomicOr(&control.found_now, 1U);
    if (!is_last_block(control)) return;
    double sums[pack_elements] = {};
    for (std::uint64_t chunk = threadIdx.x; chunk < chunks; chunk += norm_threads)
        sums[0] += __ldcg(&buffers.sums[chunk]);
    const double sum = sum_of_threads(sums);
    if (threadIdx.x == 0) {
        finish_check(work, sum, atomicExch(&control.found_now, 0U) != 0, control);
        control.finished_blocks = 0;
    }
}

__global__ void set_value(double* destination, double value) {
    *destination = value;
}

}  // namespace

const void* update_flat(rule_kind rule, bool doubles) {
    return visit_rule(rule, [=](auto chosen) {
        using rule_type = decltype(chosen);
        return doubles ? reinterpret_cast<const void*>(&update_parameters<rule_type, true>)
                       : reinterpret_cast<const void*>(&update_parameters<rule_type, false>);
    });
}

const void* check_flat() {
    return reinterpret_cast<const void*>(&check_gradients);
}

const void* set_number() {
    return reinterpret_cast<const void*>(&set_value);
}

}  // namespace pinflow::detail::cuda
