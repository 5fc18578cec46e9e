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

/// Whether the calling thread is the last one of those that call it, one in each block of a kernel. Sets
/// counted_blocks back to 0 then.
__device__ bool is_last_thread(flat_control& control) {
    __threadfence();
    if (atomicAdd(&control.counted_blocks, 1U) + 1 != gridDim.x) return false;
    control.counted_blocks = 0;
    return true;
}

// From compute capability 9.0 on, blocks of a kernel that is launched with launch_early may start once all
// blocks of the kernel before it have called start_next_kernel. They must wait before they touch what it
// writes.

/// Waits until the kernel before this one in the stream has ended, and so all work before that: our kernels
/// wait before they let others start.
__device__ void wait_for_work_before() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
/// Allows blocks of the next kernel to start, once one thread of each block of this one has got here.
__device__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
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

/// Waits for the previous kernel, lets the next one start, and reads what all segments of a step need. One
/// thread of each block calls it.
__device__ void begin_step(const flat_step& work, step_start& start) {
    wait_for_work_before();
    start_next_kernel();
    start = start_of(work);
}
/// Ends a step once all blocks have begun it. One thread of each block calls it.
__device__ void end_step(const flat_step& work, const step_start& start) {
    flat_control& control = *work.buffers.control;
    if (is_last_thread(control)) finish_step(start.skipped, control);
}

template <typename Rule, typename Real>
__device__ __noinline__ void prepare_block(const flat_step& work, const rule_numbers& numbers,
                                           const step_start& start, block_step<Rule, Real>& step) {
    step.rule = Rule::template prepare<Real>(numbers, start.number);
    step.decay = prepare_decay<Real>(numbers);
    step.change = prepare_change<Real>(work, start.factor);
    step.skipped = start.skipped;
}

/// Updates the packs of one segment. The first segment also begins and ends the step. `start` is in shared
/// memory.
template <typename Rule, typename Stored, typename Real>
__device__ void update_segment(const flat_step& work, const flat_segment& segment, bool is_first,
                               step_start& start) {
    constexpr unsigned states = Rule::state_count;
    const flat_buffers& buffers = work.buffers;
    // The first update waits for what prepare_block makes of the group's numbers and the control. So the
    // numbers are loaded first, and so is the control, unless the work follows a check. Each thread loads a
    // word, so that the numbers take the time of one load.
    __shared__ rule_numbers numbers;
    constexpr unsigned number_words = sizeof(rule_numbers) / sizeof(std::uint64_t);
    static_assert(number_words <= update_threads && sizeof(rule_numbers) % sizeof(std::uint64_t) == 0);
    std::uint64_t word = 0;
    if (threadIdx.x < number_words)
        word = reinterpret_cast<const std::uint64_t*>(buffers.groups + segment.group)[threadIdx.x];
    const bool begins_now = is_first && !work.follows_check;
    if (begins_now && threadIdx.x == 0) begin_step(work, start);

    pack<Stored>* const parameters = packs_at<Stored>(buffers.parameters, segment.parameter_bytes);
    const pack<Stored>* const gradients = packs_at<Stored>(buffers.gradients, segment.parameter_bytes);
    pack<Real>* state_packs[states + 1];
    for (unsigned k = 0; k <= states; ++k)
        state_packs[k] = packs_at<Real>(buffers.states[k], segment.state_bytes);
    const bool has_master = sizeof(Stored) == 2 && buffers.has_masters;
    // A thread takes the same packs in both directions. Backwards, the index wraps around before the first
    // one.
    const std::uint64_t count = segment.end_pack - segment.begin_pack;
    std::uint64_t next = std::uint64_t{blockIdx.x} * update_threads + threadIdx.x;
    std::uint64_t distance = std::uint64_t{gridDim.x} * update_threads;
    if (work.backwards && count != 0) {
        next += (count - 1) / distance * distance;
        if (next >= count) next -= distance;
        distance = 0 - distance;
    }
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
    if (next < count) packs = load(next);
    if (threadIdx.x < number_words) reinterpret_cast<std::uint64_t*>(&numbers)[threadIdx.x] = word;
    __syncthreads();  // all threads are done with the last segment
    if (threadIdx.x == 0) {
        if (is_first && !begins_now) begin_step(work, start);
        prepare_block(work, numbers, start, shared);
    }
    __syncthreads();
    // another warp than that of the thread that prepares the step
    if (is_first && threadIdx.x == update_threads - 1) end_step(work, start);
    const block_step<Rule, Real> now = shared;

    if (now.skipped) return;
    while (next < count) {
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
            state_packs[k][next] = packs.states[k];
        if (has_master) state_packs[states][next] = packs.states[states];
        parameters[next] = packs.parameter;
        next += distance;
        if (next < count) packs = load(next);
    }
}

/// Doubles: whether there are float64 parameters, whose arithmetic takes twice the registers.
template <typename Rule, bool Doubles>
__global__ void __launch_bounds__(update_threads, update_blocks(Doubles))
    update_parameters(const __grid_constant__ flat_step work) {
    // After a check, the first loads need not wait: the check writes nothing that they read, and it has
    // waited for all work before itself.
    if (!work.follows_check) wait_for_work_before();
    __shared__ step_start start;
    const flat_buffers& buffers = work.buffers;
    for (std::uint32_t i = 0; i < buffers.segment_count; ++i) {
        const flat_segment& segment = segment_at(buffers, work.backwards ? buffers.segment_count - 1 - i : i);
        switch (segment.type) {
            case flat_type::float16:
                update_segment<Rule, half_bits, float>(work, segment, i == 0, start);
                break;
            case flat_type::bfloat16:
                update_segment<Rule, bfloat16_bits, float>(work, segment, i == 0, start);
                break;
            case flat_type::float32:
                update_segment<Rule, float, float>(work, segment, i == 0, start);
                break;
            case flat_type::float64:
                if constexpr (Doubles) update_segment<Rule, double, double>(work, segment, i == 0, start);
                break;
        }
    }
    if (buffers.segment_count == 0 && threadIdx.x == 0) {
        begin_step(work, start);
        end_step(work, start);
    }
}

// ---- the check of the gradients --------------------------------------------------------------------------

/// Adds up the sums of all threads of a block in the order that flat_work.hpp gives; the result is thread
/// 0's.
__device__ double sum_of_threads(const double (&sums)[pack_elements]) {
    constexpr unsigned warp_threads = 32;
    __shared__ double totals[norm_threads];
    __syncthreads();
    totals[threadIdx.x] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (unsigned distance = norm_threads / 2; distance >= warp_threads; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance) totals[threadIdx.x] += totals[threadIdx.x + distance];
    }
    double total = totals[threadIdx.x];
    for (unsigned distance = warp_threads / 2; distance != 0; distance /= 2)
        total += __shfl_down_sync(~0U, total, distance);
    return total;
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
    wait_for_work_before();
    // not before: the first loads of a step after the check rely on the wait
    start_next_kernel();
    const flat_buffers& buffers = work.buffers;
    flat_control& control = *buffers.control;
    const std::uint64_t chunks = norm_sum_count(buffers.pack_count);
    bool finite = true;
    for (std::uint64_t place = blockIdx.x; place < chunks; place += gridDim.x) {
        const std::uint64_t chunk = work.backwards ? chunks - 1 - place : place;
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
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) is_last = is_last_thread(control);
    __syncthreads();
    if (!is_last) return;
    double sums[pack_elements] = {};
#pragma unroll 4
    for (std::uint64_t chunk = threadIdx.x; chunk < chunks; chunk += norm_threads)
        sums[0] += __ldcg(&buffers.sums[chunk]);
    const double sum = sum_of_threads(sums);
    if (threadIdx.x == 0) finish_check(work, sum, atomicExch(&control.found_now, 0U) != 0, control);
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
