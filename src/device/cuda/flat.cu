#include <type_traits>

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

/// Loads past the first-level cache, where a kernel that starts early may find what the step before has left.
struct past_first_cache {
    template <typename T>
    __device__ pack<T> operator()(const pack<T>* from) const {
        using word = std::conditional_t<alignof(pack<T>) == 16, uint4, uint2>;
        constexpr unsigned count = sizeof(pack<T>) / sizeof(word);
        word words[count];
        for (unsigned i = 0; i != count; ++i)
            words[i] = __ldcg(reinterpret_cast<const word*>(from) + i);
        pack<T> loaded;
        memcpy(&loaded, words, sizeof loaded);
        return loaded;
    }
};
struct through_all_caches {
    template <typename T>
    __device__ pack<T> operator()(const pack<T>* from) const {
        return *from;
    }
};

__device__ const flat_segment& segment_at(const flat_buffers& buffers, std::uint32_t index) {
    return index < flat_buffers::max_near_segments ? buffers.near_segments[index] : buffers.segments[index];
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

// ---- sums ------------------------------------------------------------------------------------------------

/// Adds the totals of all threads of a block in the order that flat_work.hpp gives; the result is thread 0's.
/// The caller must synchronise the block before the next call.
__device__ double sum_of_threads(double total) {
    constexpr unsigned warp_threads = 32;
    __shared__ double totals[norm_threads];
    totals[threadIdx.x] = total;
    for (unsigned distance = norm_threads / 2; distance >= warp_threads; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance) totals[threadIdx.x] += totals[threadIdx.x + distance];
    }
    total = totals[threadIdx.x];
    for (unsigned distance = warp_threads / 2; distance != 0; distance /= 2)
        total += __shfl_down_sync(~0U, total, distance);
    return total;
}

/// Adds the sums of all chunks; only thread 0's result is valid. Sets `finite` in all threads: whether all
/// gradients are. The block has norm_threads threads.
__device__ double sum_of_chunks(const flat_buffers& buffers, bool& finite) {
    const std::uint64_t chunks = norm_sum_count(buffers.pack_count);
    double total = 0;
    int negative = 0;
#pragma unroll
    for (unsigned round = 0; round != max_norm_sums / norm_threads; ++round) {
        const std::uint64_t chunk = round * norm_threads + threadIdx.x;
        if (chunk >= chunks) continue;
        const double checked = __ldcg(buffers.sums + chunk);
        total += fabs(checked);
        if (!is_finite_sum(checked)) negative = 1;
    }
    finite = __syncthreads_or(negative) == 0;
    return sum_of_threads(total);
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
};

/// What a step is prepared of, in shared memory: copied by the threads, a word by each, which takes the time
/// of one load.
struct step_inputs {
    std::uint64_t steps;   ///< that have been made before
    rule_numbers numbers;  ///< of the segment's group
};
static_assert(update_threads == norm_threads);  // a step sums what a check has found
constexpr unsigned input_words = sizeof(step_inputs) / sizeof(std::uint64_t);
static_assert(sizeof(step_inputs) == sizeof(std::uint64_t) + sizeof(rule_numbers) &&
              input_words <= update_threads && input_words * sizeof(std::uint64_t) == sizeof(step_inputs));

/// A word of the inputs, past the first-level cache.
__device__ std::uint64_t input_word(const flat_step& work, const flat_segment& segment, unsigned index) {
    const auto* const numbers = reinterpret_cast<const std::uint64_t*>(work.buffers.groups + segment.group);
    return __ldcg(index == 0 ? &work.buffers.control->steps : numbers + (index - 1));
}

/// Once the work before the step has ended, sums what a check has found, and lets the next kernel start. All
/// threads of a block call it; `start`, in shared memory, is valid after they synchronise.
__device__ void begin_step(const flat_step& work, step_start& start) {
    double sum = 0;
    bool finite = true;
    if (work.follows_check) {
        wait_for_work_before();
        sum = sum_of_chunks(work.buffers, finite);
    }
    if (threadIdx.x != 0) return;
    start_next_kernel();
    start = start_of(work, sum, finite);
}

/// Ends a step once all blocks have begun it. One thread of each block calls it.
__device__ void end_step(const flat_step& work, const step_start& start) {
    flat_control& control = *work.buffers.control;
    __threadfence();
    if (atomicAdd(&control.begun_blocks, 1U) + 1 != gridDim.x) return;
    control.begun_blocks = 0;
    finish_step(work, start);
}

/// What does not depend on a check.
template <typename Rule, typename Real>
__device__ __noinline__ void prepare_rule(const step_inputs& inputs, block_step<Rule, Real>& step) {
    step.rule = Rule::template prepare<Real>(inputs.numbers, inputs.steps + 1);
    step.decay = prepare_decay<Real>(inputs.numbers);
}

/// Updates the packs of one segment. The first segment also begins and ends the step. `inputs` and `start`
/// are in shared memory.
template <typename Rule, typename Stored, typename Real>
__device__ void update_segment(const flat_step& work, const flat_segment& segment, bool is_first,
                               step_inputs& inputs, step_start& start) {
    constexpr unsigned states = Rule::state_count;
    const flat_buffers& buffers = work.buffers;
    // Loaded first, because the first update waits for what is prepared of them. Later segments keep the
    // number of steps, which the last block to begin the step changes.
    const bool has_word = threadIdx.x < input_words && (is_first || threadIdx.x != 0);
    std::uint64_t word = 0;
    if (has_word) word = input_word(work, segment, threadIdx.x);

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
    const auto load = [&](std::uint64_t i, auto from) {
        element_packs<Rule, Stored, Real> packs;
        packs.gradient = from(gradients + i);
        packs.parameter = from(parameters + i);
        for (unsigned k = 0; k != states; ++k)
            packs.states[k] = from(state_packs[k] + i);
        if (has_master) packs.states[states] = from(state_packs[states] + i);
        return packs;
    };

    // While one thread prepares what the group's step needs, the first packs arrive.
    alignas(16) __shared__ unsigned char memory[sizeof(block_step<Rule, Real>)];
    auto& shared = *reinterpret_cast<block_step<Rule, Real>*>(memory);
    element_packs<Rule, Stored, Real> packs;
    if (next < count) packs = load(next, past_first_cache{});
    if (has_word) reinterpret_cast<std::uint64_t*>(&inputs)[threadIdx.x] = word;
    __syncthreads();  // all threads are done with the last segment
    if (threadIdx.x == 0) prepare_rule(inputs, shared);
    if (is_first) begin_step(work, start);
    if (threadIdx.x == 0) shared.change = prepare_change<Real>(work, start.factor);
    __syncthreads();
    // another warp than that of the thread that prepares the step
    if (is_first && threadIdx.x == update_threads - 1) end_step(work, start);
    if (start.skipped) return;
    const block_step<Rule, Real> now = shared;
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
        if (next < count) packs = load(next, through_all_caches{});
    }
}

/// Doubles: whether there are float64 parameters, whose arithmetic takes twice the registers.
template <typename Rule, bool Doubles>
__global__ void __launch_bounds__(update_threads, update_blocks(Doubles))
    update_parameters(const __grid_constant__ flat_step work) {
    // After a check, the first loads need not wait: the check writes nothing that they read, and it has
    // waited for all work before itself.
    if (!work.follows_check) wait_for_work_before();
    __shared__ step_inputs inputs;
    __shared__ step_start start;
    const flat_buffers& buffers = work.buffers;
    for (std::uint32_t i = 0; i < buffers.segment_count; ++i) {
        const flat_segment& segment = segment_at(buffers, work.backwards ? buffers.segment_count - 1 - i : i);
        switch (segment.type) {
            case flat_type::float16:
                update_segment<Rule, half_bits, float>(work, segment, i == 0, inputs, start);
                break;
            case flat_type::bfloat16:
                update_segment<Rule, bfloat16_bits, float>(work, segment, i == 0, inputs, start);
                break;
            case flat_type::float32:
                update_segment<Rule, float, float>(work, segment, i == 0, inputs, start);
                break;
            case flat_type::float64:
                if constexpr (Doubles)
                    update_segment<Rule, double, double>(work, segment, i == 0, inputs, start);
                break;
        }
    }
    if (buffers.segment_count == 0) {
        begin_step(work, start);
        if (threadIdx.x == 0) end_step(work, start);
    }
}

// ---- the check of the gradients --------------------------------------------------------------------------

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
    const std::uint64_t chunks = norm_sum_count(buffers.pack_count);
    const std::uint64_t packs = packs_of_chunk(buffers.pack_count);
    for (std::uint64_t place = blockIdx.x; place < chunks; place += gridDim.x) {
        const std::uint64_t chunk = work.backwards ? chunks - 1 - place : place;
        double sums[pack_elements] = {};
        bool finite = true;
        const std::uint64_t begin = chunk * packs;
        const std::uint64_t end = begin + packs < buffers.pack_count ? begin + packs : buffers.pack_count;
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
        finite = __syncthreads_and(finite) != 0;
        const double sum = sum_of_threads((sums[0] + sums[1]) + (sums[2] + sums[3]));
        if (threadIdx.x == 0) buffers.sums[chunk] = checked_sum(sum, finite);
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
