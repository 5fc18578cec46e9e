#pragma once

#include <cstddef>
#include <cstdint>

#include "src/core/scalar.hpp"
#include "src/device/update_rules.hpp"

#ifdef __CUDACC__
#define PINFLOW_DETAIL_HOST_DEVICE __host__ __device__
#else
#define PINFLOW_DETAIL_HOST_DEVICE
#endif

/// Arguments of the device operations that update parameters in flat buffers. nvcc compiles this file, too.
namespace pinflow::detail {

/// The types of parameters and their gradients. Arithmetic and state are double for float64, otherwise float.
enum class flat_type : std::uint8_t { float16, bfloat16, float32, float64 };

/// What a thread updates at a time: this many neighbouring elements.
inline constexpr unsigned pack_elements = 4;

/// Elements of one type and one group, contiguous in each buffer. Their number is a multiple of
/// pack_elements.
struct flat_segment {
    std::uint64_t end_pack = 0;         ///< packs of this segment and of all before it
    std::uint64_t begin_pack = 0;       ///< packs of all segments before it
    std::uint64_t parameter_bytes = 0;  ///< where it begins in the buffers of parameters and of gradients
    std::uint64_t state_bytes = 0;      ///< where it begins in each buffer of state
    std::uint32_t group = 0;
    flat_type type = flat_type::float32;
};

/// Numbers that steps change, in device memory, so that a step can be replayed in a CUDA graph.
struct flat_control {
    std::uint64_t steps = 0;         ///< that have been made
    std::uint64_t skipped = 0;       ///< because of gradients that are not finite
    double norm = 0;                 ///< of the gradients, in the last step that followed a check
    std::uint32_t begun_blocks = 0;  ///< thread blocks that have begun the running step
};

/// The buffers of one object. All pointers are to device memory.
struct flat_buffers {
    const flat_segment* segments = nullptr;
    std::uint32_t segment_count = 0;
    /// Copies of the first segments. A kernel gets them with its arguments, without a load from memory.
    static constexpr unsigned max_near_segments = 4;
    flat_segment near_segments[max_near_segments] = {};
    const rule_numbers* groups = nullptr;
    std::uint64_t pack_count = 0;
    std::byte* parameters = nullptr;
    const std::byte* gradients = nullptr;
    /// The rule's states; then, if has_masters, the master copies, which only elements of the 16-bit types
    /// use. All have the same size.
    std::byte* states[max_rule_states + 1] = {};
    bool has_masters = false;
    bool has_doubles = false;  ///< whether there are segments of float64
    flat_control* control = nullptr;
    double* sums = nullptr;  ///< checked_sum of each chunk, norm_sum_count(pack_count) of them
    /// The factor by which the loss, and so each gradient, was multiplied (torch.amp.GradScaler's scale).
    /// Null: 1.
    const float* scale = nullptr;
    /// Not 0 if the caller found gradients that are not finite (GradScaler's found_inf). Null: 0.
    const float* found = nullptr;
};

/// A check of all gradients: computes the sums that the step after it reads.
struct gradient_check {
    flat_buffers buffers;
    bool backwards = false;  ///< a GPU goes from the end of the buffers to the start
};

/// One step.
struct flat_step {
    flat_buffers buffers;
    rule_kind rule = rule_kind::adam;
    bool backwards = false;      ///< a GPU goes from the end of the buffers to the start
    bool follows_check = false;  ///< enqueued right after a check of the same gradients
    bool skips = false;          ///< changes nothing if the check found gradients that are not finite
    bool clips = false;          ///< multiplies the gradients so that their norm becomes `max_norm` at most
    bool clamps = false;
    double max_norm = 0;
    double max_magnitude = 0;  ///< of each element of the gradients, if `clamps`
};

// The order in which the norm is summed, on every device. Thread t of a chunk reads the packs t, t +
// norm_threads and so on. Its sum e takes the squares of element e of each pack; then it adds its sums as
// (0 + 1) + (2 + 3). The sums of the threads are added in pairs at a distance of norm_threads / 2,
// norm_threads / 4, and so on. The sums of the chunks are added in the same way: thread t takes t, t +
// norm_threads and so on.
inline constexpr unsigned norm_threads = 256;
/// Each thread block of a step adds all sums, so there are few.
inline constexpr std::uint64_t max_norm_sums = 1024;
inline constexpr std::uint64_t min_norm_rounds = 4;

/// The number of packs that each thread of a chunk reads (fewer in the last chunk).
PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint64_t norm_rounds(std::uint64_t pack_count) {
    constexpr std::uint64_t packs_of_round = max_norm_sums * norm_threads;
    const std::uint64_t rounds = (pack_count + packs_of_round - 1) / packs_of_round;
    return rounds < min_norm_rounds ? min_norm_rounds : rounds;
}
PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint64_t packs_of_chunk(std::uint64_t pack_count) {
    return norm_rounds(pack_count) * norm_threads;
}
PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint64_t norm_sum_count(std::uint64_t pack_count) {
    return (pack_count + packs_of_chunk(pack_count) - 1) / packs_of_chunk(pack_count);
}

/// What a check stores for a chunk: the sum of squares, with a negative sign if gradients are not finite. (A
/// sum of squares of finite doubles may be infinite.)
PINFLOW_DETAIL_HOST_DEVICE inline double checked_sum(double sum, bool finite) {
    return copysign(sum, finite ? 1.0 : -1.0);
}
PINFLOW_DETAIL_HOST_DEVICE inline bool is_finite_sum(double checked) {
    return copysign(1.0, checked) > 0;
}

/// A 16-bit parameter's value: that of the master copy, unless others have written to the parameter since.
template <typename Stored, typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline Real value_of(Stored parameter, Real master) {
    return cast_scalar<Stored>(master).bits == parameter.bits ? master : cast_scalar<Real>(parameter);
}

/// What a step needs to know about its gradients.
struct step_start {
    double norm;    ///< 0 without a check
    double factor;  ///< that they are multiplied by
    bool skipped;   ///< the step changes nothing
};

/// `sum` is that of the squares of all gradients, and `finite` tells whether all are finite, if the step
/// follows a check.
PINFLOW_DETAIL_HOST_DEVICE inline step_start start_of(const flat_step& work, double sum, bool finite) {
    const flat_buffers& buffers = work.buffers;
    const bool is_scaled = buffers.scale != nullptr;
    const double scale = is_scaled ? static_cast<double>(*buffers.scale) : 1.0;
    step_start start{0, 1, false};
    if (work.follows_check) start.norm = is_scaled ? sqrt(sum) / scale : sqrt(sum);
    if (work.clips) {
        // as torch.nn.utils.clip_grad_norm_
        const double ratio = work.max_norm / (start.norm + 1e-6);
        start.factor = ratio >= 1 ? 1.0 : ratio;
    }
    if (is_scaled) start.factor /= scale;
    start.skipped = (work.skips && !finite) || (buffers.found != nullptr && *buffers.found != 0);
    return start;
}

/// What happens to the gradients of a step before the rule sees them.
template <typename Real>
struct gradient_change {
    Real factor = 1;
    Real limit = 0;
    bool clamps = false;
};

template <typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline gradient_change<Real> prepare_change(const flat_step& work, double factor) {
    return {static_cast<Real>(factor), static_cast<Real>(work.max_magnitude), work.clamps};
}

template <typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline Real apply_change(const gradient_change<Real>& change, Real gradient) {
    gradient *= change.factor;
    const Real below = gradient > change.limit ? change.limit : gradient;
    const Real limited = below < -change.limit ? -change.limit : below;
    return change.clamps ? limited : gradient;
}

PINFLOW_DETAIL_HOST_DEVICE inline void finish_step(const flat_step& work, const step_start& start) {
    flat_control& control = *work.buffers.control;
    if (work.follows_check) control.norm = start.norm;
    if (start.skipped) {
        ++control.skipped;
    } else {
        ++control.steps;
    }
}

}  // namespace pinflow::detail

#undef PINFLOW_DETAIL_HOST_DEVICE
