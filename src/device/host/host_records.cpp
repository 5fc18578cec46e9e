#include "src/device/host/host_records.hpp"

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "src/core/scalar.hpp"

// Compiled without contraction to fused multiply-adds: see CMakeLists.txt.

namespace pinflow::detail::host_records {

namespace {

/// Records that one task updates.
constexpr std::size_t records_of_task = 16;

template <typename Visitor>
void visit_stored(flat_type type, Visitor visit) {
    if (type == flat_type::float16) return visit(half_bits{});
    if (type == flat_type::bfloat16) return visit(bfloat16_bits{});
    visit(0.0F);
}

/// The sum of the gradients of a row.
template <typename Gradient>
void sum_gradients(const record_update& work, std::uint64_t row, std::vector<float>& sums) {
    const auto* const gradients = reinterpret_cast<const Gradient*>(work.gradients);
    for (std::uint32_t i = work.starts[row]; i < work.starts[row + 1]; ++i) {
        const Gradient* const from = gradients + std::uint64_t{work.positions[i]} * sums.size();
        const bool is_first = i == work.starts[row];
        for (std::size_t column = 0; column < sums.size(); ++column) {
            const float value = cast_scalar<float>(from[column]);
            sums[column] = is_first ? value : sums[column] + value;
        }
    }
}

/// The sum of the squares of a row's gradients, as record_work.hpp says.
template <typename Stored>
float squares_of(const Stored* weights, const std::vector<float>& gradients, const decay_step<float>& decay) {
    float totals[square_sums] = {};
    for (std::size_t column = 0; column < gradients.size(); ++column) {
        float value = cast_scalar<float>(weights[column]);
        float slope = gradients[column];
        apply_decay(decay, value, slope);
        totals[column / columns_of_turn % square_sums] += slope * slope;
    }
    for (unsigned distance = square_sums / 2; distance != 0; distance /= 2) {
        for (unsigned i = 0; i < distance; ++i)
            totals[i] += totals[i + distance];
    }
    return totals[0];
}

template <typename Rule, typename Stored>
void update_record(const record_layout& layout, std::byte* record, const std::vector<float>& sums,
                   const record_step<Rule>& now) {
    auto* const weights = reinterpret_cast<Stored*>(record);
    if constexpr (is_rowwise<Rule>) {
        auto& state = *reinterpret_cast<float*>(record + layout.states_bytes[0]);
        state = Rule::add_mean_square(now.rule, state, squares_of(weights, sums, now.decay), layout.columns);
    }
    for (std::size_t column = 0; column < sums.size(); ++column) {
        float value = cast_scalar<float>(weights[column]);
        float slope = sums[column];
        float own[Rule::state_count + 1];
        const std::size_t element = is_rowwise<Rule> ? 0 : column;
        for (unsigned k = 0; k != Rule::state_count; ++k)
            own[k] = reinterpret_cast<const float*>(record + layout.states_bytes[k])[element];
        apply_decay(now.decay, value, slope);
        Rule::update(now.rule, value, slope, own);
        for (unsigned k = 0; k != Rule::state_count; ++k)
            reinterpret_cast<float*>(record + layout.states_bytes[k])[element] = own[k];
        weights[column] = cast_scalar<Stored>(value);
    }
}

}  // namespace

void patch(const record_patch& work) {
    const auto* const newer_end = work.newer.ids + *work.newer.count;
    tbb::parallel_for(tbb::blocked_range<std::uint64_t>(0, *work.rows.count, 256), [&](const auto& rows) {
        const auto* newer = work.newer.ids;
        for (std::uint64_t row = rows.begin(); row != rows.end(); ++row) {
            newer = std::lower_bound(newer, newer_end, work.rows.ids[row]);
            if (newer == newer_end) return;
            if (*newer != work.rows.ids[row]) continue;
            const auto index = static_cast<std::uint64_t>(newer - work.newer.ids);
            std::memcpy(work.rows.records + row * work.record_bytes,
                        work.newer.records + index * work.record_bytes, work.record_bytes);
        }
    });
}

void update(const record_update& work) {
    const record_layout& layout = work.layout;
    visit_rule(work.rule, [&](auto rule) {
        using rule_type = decltype(rule);
        const auto update_rows = [&](const tbb::blocked_range<std::uint64_t>& rows) {
            std::vector<float> sums(layout.columns);
            for (std::uint64_t row = rows.begin(); row != rows.end(); ++row) {
                std::byte* const record = work.rows.records + row * layout.size_bytes;
                auto& steps = *reinterpret_cast<std::uint32_t*>(record + layout.steps_bytes);
                ++steps;
                const record_step<rule_type> now{rule_type::template prepare<float>(*work.numbers, steps),
                                                 prepare_decay<float>(*work.numbers)};
                visit_stored(work.gradient_type,
                             [&](auto gradient) { sum_gradients<decltype(gradient)>(work, row, sums); });
                visit_stored(layout.type, [&](auto stored) {
                    update_record<rule_type, decltype(stored)>(layout, record, sums, now);
                });
            }
        };
        tbb::parallel_for(tbb::blocked_range<std::uint64_t>(0, *work.rows.count, records_of_task),
                          update_rows);
    });
}

}  // namespace pinflow::detail::host_records
