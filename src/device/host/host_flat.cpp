#include "src/device/host/host_flat.hpp"

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "src/core/scalar.hpp"

// Compiled without contraction to fused multiply-adds, and without errno, which would keep square roots from
// being vectorised: see CMakeLists.txt.

namespace pinflow::detail::host_flat {

namespace {

/// The packs that one task updates: 16 KiB of float32 in each buffer.
constexpr std::uint64_t packs_of_task = 1024;

/// Calls visit(element, real) with null pointers to the type of parameters and to that of arithmetic.
template <typename Visitor>
void visit_type(flat_type type, Visitor visit) {
    switch (type) {
        case flat_type::float16:
            return visit(static_cast<half_bits*>(nullptr), static_cast<float*>(nullptr));
        case flat_type::bfloat16:
            return visit(static_cast<bfloat16_bits*>(nullptr), static_cast<float*>(nullptr));
        case flat_type::float32:
            return visit(static_cast<float*>(nullptr), static_cast<float*>(nullptr));
        case flat_type::float64:
            return visit(static_cast<double*>(nullptr), static_cast<double*>(nullptr));
    }
}

/// Calls work(segment, begin, end) for packs of one segment each, in parallel; begin and end count from the
/// segment's first pack.
template <typename Work>
void for_packs(const flat_buffers& buffers, std::uint64_t grain, Work work) {
    tbb::parallel_for(std::uint64_t{0}, (buffers.pack_count + grain - 1) / grain, [&](std::uint64_t task) {
        std::uint64_t begin = task * grain;
        const std::uint64_t end = std::min(begin + grain, buffers.pack_count);
        const flat_segment* segment = buffers.segments;
        while (segment->end_pack <= begin)
            ++segment;
        for (; begin < end; ++segment) {
            const std::uint64_t stop = std::min(end, segment->end_pack);
            work(*segment, begin - segment->begin_pack, stop - segment->begin_pack);
            begin = stop;
        }
    });
}

// ---- the norm --------------------------------------------------------------------------------------------

/// Sums the threads of a chunk in pairs, as the order of flat_work.hpp says.
double sum_of_threads(double (&sums)[norm_threads][pack_elements]) {
    double totals[norm_threads];
    for (unsigned thread = 0; thread < norm_threads; ++thread)
        totals[thread] = (sums[thread][0] + sums[thread][1]) + (sums[thread][2] + sums[thread][3]);
    for (unsigned distance = norm_threads / 2; distance != 0; distance /= 2) {
        for (unsigned thread = 0; thread < distance; ++thread)
            totals[thread] += totals[thread + distance];
    }
    return totals[0];
}

/// Adds the squares of neighbouring elements to neighbouring sums. Returns 0 if all are finite, otherwise
/// NaN.
template <typename Real, typename Stored>
Real add_squares(double* sums, const Stored* values, std::uint64_t count) {
    Real worst[pack_elements] = {};
    for (std::uint64_t i = 0; i < count; i += pack_elements) {
        for (unsigned e = 0; e < pack_elements; ++e) {
            const auto value = cast_scalar<Real>(values[i + e]);
            worst[e] += value * 0;  // 0 as long as all are finite, then NaN
            sums[i + e] += static_cast<double>(value) * static_cast<double>(value);
        }
    }
    return (worst[0] + worst[1]) + (worst[2] + worst[3]);
}

/// The checked_sum of a chunk.
double check_chunk(const flat_buffers& buffers, std::uint64_t chunk) {
    double sums[norm_threads][pack_elements] = {};
    bool finite = true;
    const std::uint64_t chunk_packs = packs_of_chunk(buffers.pack_count);
    std::uint64_t pack = chunk * chunk_packs;
    const std::uint64_t end = std::min(pack + chunk_packs, buffers.pack_count);
    const flat_segment* segment = buffers.segments;
    while (segment->end_pack <= pack)
        ++segment;
    for (; pack < end; ++segment) {
        const std::uint64_t stop = std::min(end, segment->end_pack);
        visit_type(segment->type, [&](auto* element, auto* real) {
            using stored = std::remove_pointer_t<decltype(element)>;
            using number = std::remove_pointer_t<decltype(real)>;
            const auto* const gradients =
                reinterpret_cast<const stored*>(buffers.gradients + segment->parameter_bytes);
            number worst = 0;
            while (pack < stop) {
                const std::uint64_t thread = pack % norm_threads;
                const std::uint64_t packs = std::min(stop - pack, norm_threads - thread);
                worst += add_squares<number>(sums[thread],
                                             gradients + (pack - segment->begin_pack) * pack_elements,
                                             packs * pack_elements);
                pack += packs;
            }
            finite = finite && worst == 0;
        });
    }
    return checked_sum(sum_of_threads(sums), finite);
}

// ---- a step ----------------------------------------------------------------------------------------------

template <typename Rule, typename Real>
struct step_numbers {
    typename Rule::template step<Real> rule;
    decay_step<Real> decay;
    gradient_change<Real> change;
};

/// Updates elements; Master tells whether `states` ends with a master copy. All arguments are values, and the
/// buffers do not overlap, so that compilers vectorise the loop.
template <typename Rule, bool Master, typename Stored, typename Real>
void update(Stored* parameters, const Stored* gradients, std::array<Real*, Rule::state_count + 1> states,
            std::uint64_t count, const step_numbers<Rule, Real> now) {
#ifndef __clang__
#pragma GCC ivdep
#endif
    for (std::uint64_t i = 0; i < count; ++i) {
        Real parameter = 0;
        if constexpr (Master) {
            parameter = value_of(parameters[i], states[Rule::state_count][i]);
        } else {
            parameter = cast_scalar<Real>(parameters[i]);
        }
        Real gradient = apply_change(now.change, cast_scalar<Real>(gradients[i]));
        Real state[Rule::state_count + 1];
        for (unsigned k = 0; k != Rule::state_count; ++k)
            state[k] = states[k][i];
        apply_decay(now.decay, parameter, gradient);
        Rule::update(now.rule, parameter, gradient, state);
        for (unsigned k = 0; k != Rule::state_count; ++k)
            states[k][i] = state[k];
        parameters[i] = cast_scalar<Stored>(parameter);
        if constexpr (Master) states[Rule::state_count][i] = parameter;
    }
}

step_start begin_step(const flat_step& work) {
    if (!work.follows_check) return start_of(work, 0, true);
    const flat_buffers& buffers = work.buffers;
    double totals[norm_threads][pack_elements] = {};
    bool finite = true;
    for (std::uint64_t chunk = 0; chunk < norm_sum_count(buffers.pack_count); ++chunk) {
        totals[chunk % norm_threads][0] += std::abs(buffers.sums[chunk]);
        finite = finite && is_finite_sum(buffers.sums[chunk]);
    }
    return start_of(work, sum_of_threads(totals), finite);
}

/// Updates packs of one segment.
template <typename Rule, typename Stored, typename Real>
void update_packs(const flat_buffers& buffers, const flat_segment& segment, std::uint64_t begin,
                  std::uint64_t end, const step_numbers<Rule, Real>& now) {
    const std::uint64_t first = begin * pack_elements;
    const std::uint64_t count = (end - begin) * pack_elements;
    auto* const parameters = reinterpret_cast<Stored*>(buffers.parameters + segment.parameter_bytes) + first;
    const auto* const gradients =
        reinterpret_cast<const Stored*>(buffers.gradients + segment.parameter_bytes) + first;
    std::array<Real*, Rule::state_count + 1> states{};
    for (unsigned k = 0; k <= Rule::state_count; ++k) {
        if (buffers.states[k] != nullptr)
            states[k] = reinterpret_cast<Real*>(buffers.states[k] + segment.state_bytes) + first;
    }
    if constexpr (sizeof(Stored) == 2) {
        if (buffers.has_masters) return update<Rule, true>(parameters, gradients, states, count, now);
    }
    update<Rule, false>(parameters, gradients, states, count, now);
}

}  // namespace

void check(const gradient_check& work) {
    const flat_buffers& buffers = work.buffers;
    tbb::parallel_for(std::uint64_t{0}, norm_sum_count(buffers.pack_count),
                      [&](std::uint64_t chunk) { buffers.sums[chunk] = check_chunk(buffers, chunk); });
}

void step(const flat_step& work) {
    const flat_buffers& buffers = work.buffers;
    const step_start start = begin_step(work);
    if (!start.skipped) {
        const std::uint64_t number = buffers.control->steps + 1;
        visit_rule(work.rule, [&](auto rule) {
            using rule_type = decltype(rule);
            for_packs(buffers, packs_of_task,
                      [&](const flat_segment& segment, std::uint64_t begin, std::uint64_t end) {
                          const rule_numbers& numbers = buffers.groups[segment.group];
                          visit_type(segment.type, [&](auto* element, auto* real) {
                              using stored = std::remove_pointer_t<decltype(element)>;
                              using number_type = std::remove_pointer_t<decltype(real)>;
                              const step_numbers<rule_type, number_type> now{
                                  rule_type::template prepare<number_type>(numbers, number),
                                  prepare_decay<number_type>(numbers),
                                  prepare_change<number_type>(work, start.factor)};
                              update_packs<rule_type, stored>(buffers, segment, begin, end, now);
                          });
                      });
        });
    }
    finish_step(work, start);
}

}  // namespace pinflow::detail::host_flat
