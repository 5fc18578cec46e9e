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

/// Numbers that checks and steps change, in device memory, so that a step can be replayed in a CUDA graph.
struct flat_control {
    std::uint64_t steps = 0;      ///< that have been made
    std::uint64_t skipped = 0;    ///< because of gradients that are not finite
    double norm = 0;              ///< of the gradients, at the last check
    double coefficient = 1;       ///< of clipping, in the next step: see factor_of
    std::uint32_t found = 0;      ///< 1 if the last check found gradients that are not finite
    std::uint32_t found_now = 0;  ///< the same, of the running check
    std::uint32_t counted_blocks =
        0;  ///< of the running kernel: that have begun the step, or ended the check
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
    double* sums = nullptr;  ///< norm_sum_count(pack_count) of them
    /// The factor by which the loss, and so each gradient, was multiplied (torch.amp.GradScaler's scale).
    /// Null: 1.
    const float* scale = nullptr;
    /// Not 0 if the caller found gradients that are not finite (GradScaler's found_inf). Null: 0.
    const float* found = nullptr;
};

/// A check of all gradients before a step, which also computes the norm.
struct gradient_check {
    flat_buffers buffers;
    bool backwards = false;  ///< a GPU goes from the end of the buffers to the start
    bool clips = false;      ///< sets the coefficient so that the norm becomes `max_norm` at most
    double max_norm = 0;
};

/// One step.
struct flat_step {
    flat_buffers buffers;
    rule_kind rule = rule_kind::adam;
    /// The step changes nothing if the last check, of the same gradients, found any that are not finite.
    bool skips = false;
    bool backwards = false;      ///< a GPU goes from the end of the buffers to the start
    bool follows_check = false;  ///< enqueued right after a check of the same gradients
    bool clamps = false;
    double max_magnitude = 0;  ///< of each element of the gradients, if `clamps`
};

// The order in which the norm is summed, on every device. Thread t of a chunk reads the packs t, t +
// norm_threads and so on. Its sum e takes the squares of element e of each pack; then it adds its sums as
// (0 + 1) + (2 + 3). The sums of the threads are added in pairs at a distance of norm_threads / 2,
// norm_threads / 4, and so on. The sums of the chunks are added in the same way.
inline constexpr unsigned norm_threads = 256;
inline constexpr unsigned norm_rounds = 4;
inline constexpr std::uint64_t packs_of_chunk = std::uint64_t{norm_threads} * norm_rounds;

PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint64_t norm_sum_count(std::uint64_t pack_count) {
    return (pack_count + packs_of_chunk - 1) / packs_of_chunk;
}

/// A 16-bit parameter's value: that of the master copy, unless others have written to the parameter since.
template <typename Stored, typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline Real value_of(Stored parameter, Real master) {
    return cast_scalar<Stored>(master).bits == parameter.bits ? master : cast_scalar<Real>(parameter);
}

/// Whether a step changes nothing: `skips` is set and the last check found gradients that are not finite, or
/// the caller's `found` is not 0.
PINFLOW_DETAIL_HOST_DEVICE inline bool skips_step(const flat_step& work) {
    const flat_buffers& buffers = work.buffers;
    return (work.skips && buffers.control->found != 0) || (buffers.found != nullptr && *buffers.found != 0);
}

/// What the next step multiplies the gradients by.
PINFLOW_DETAIL_HOST_DEVICE inline double factor_of(const flat_buffers& buffers) {
    const double factor = buffers.control->coefficient;
    return buffers.scale == nullptr ? factor : factor / static_cast<double>(*buffers.scale);
}

/// What a step reads of the control, and of the caller's numbers.
struct step_start {
    std::uint64_t number;  ///< of the step, from 1 on
    double factor;         ///< of the gradients
    bool skipped;
};

PINFLOW_DETAIL_HOST_DEVICE inline step_start start_of(const flat_step& work) {
    return {work.buffers.control->steps + 1, factor_of(work.buffers), skips_step(work)};
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

/// Ends a check: `sum` is that of the squares of all gradients.
PINFLOW_DETAIL_HOST_DEVICE inline void finish_check(const gradient_check& work, double sum, bool found,
                                                    flat_control& control) {
    double norm = sqrt(sum);
    if (work.buffers.scale != nullptr) norm /= static_cast<double>(*work.buffers.scale);
    control.norm = norm;
    control.found = found ? 1 : 0;
    if (work.clips) {
        // as torch.nn.utils.clip_grad_norm_
        const double ratio = work.max_norm / (norm + 1e-6);
        control.coefficient = ratio >= 1 ? 1.0 : ratio;
    }
}

PINFLOW_DETAIL_HOST_DEVICE inline void finish_step(bool skipped, flat_control& control) {
    if (skipped) {
        ++control.skipped;
    } else {
        ++control.steps;
    }
    control.coefficient = 1;
    control.found = 0;
}

}  // namespace pinflow::detail

#undef PINFLOW_DETAIL_HOST_DEVICE
