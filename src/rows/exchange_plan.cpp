#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "src/core/checked.hpp"
#include "src/rows/exchange_state.hpp"
#include "src/rows/route_plan.hpp"
#include "src/rows/tuning.hpp"

/// How an exchange plans its calls, and tunes the plans.
namespace pinflow::detail {

namespace {

/// The largest group that plans are measured for.
constexpr unsigned max_batches = 64;

/// Converts a plan to its public form. Adds to the reason which of its settings the caller chose.
row_plan public_form(const rated_plan& rated, const row_exchange_options& options) {
    const transfer_plan& plan = rated.plan;
    const transfer_part* const kernel = plan.find(transfer::kernel);
    const transfer_part* const staged = plan.find(transfer::staged);
    row_plan result;
    result.route = route_of(plan);
    result.sorted = plan.parts.front().sorted;
    result.gbps = rated.gbps;
    result.reason = plan.reason;
    if (kernel == nullptr) return result;
    result.blocks = kernel->blocks;
    if (options.blocks != 0) result.reason += fmt::format("; {} thread blocks, as set", kernel->blocks);
    if (staged == nullptr) return result;
    result.staged_share = staged->share;
    if (options.staged_share != 0)
        result.reason += fmt::format("; {:.4g} of the rows staged, as set", staged->share);
    return result;
}

/// The row counts of groups of 1, 2, 4, ... and `batches` batches. Stops before the first larger group that
/// exceeds the limit of one measurement: it would be measured with fewer rows.
std::vector<std::uint64_t> counts_of_groups(std::uint64_t row_bytes, std::uint64_t batch_rows,
                                            unsigned batches) {
    std::vector<std::uint64_t> counts{batch_rows};
    for (unsigned together = 1; together < batches;) {
        together = std::min(2 * together, batches);
        const std::uint64_t count = saturated(batch_rows, together);
        if (count > measured_rows(row_bytes, count)) break;
        counts.push_back(count);
    }
    return counts;
}

}  // namespace

call_facts exchange_setup::facts_of(const call_kind& call) const {
    return {.is_scatter = call.direction == row_direction::scatter,
            .on_host = device.kind() == device_kind::host,
            .ids = call.ids,
            .is_aligned = is_aligned(table.data(), table.row_size_bytes()),
            .is_file_backed = is_file_backed(),
            .count = call.count,
            .row_bytes = table.row_size_bytes(),
            .table_bytes = table.size_bytes(),
            .threads = threads,
            .staging_buffer_bytes = staging_buffer_bytes(),
            .not_reached_reason = not_reached_reason,
            .requested = options.route,
            .staging_bytes = options.staging_bytes,
            .blocks = options.blocks,
            .staged_share = options.staged_share};
}

rated_plan exchange_state::plan_of(const call_kind& call) const {
    call_facts facts = setup_.facts_of(call);
    std::optional<rated_plan> tuned;
    if (has_choice(facts)) tuned = tuned_plan(facts, setup_.device);
    // another exchange may have been tuned after this one was made without staging buffers
    if (tuned) facts.can_stage = rings_.has_some();
    return plan_call(facts, std::move(tuned));
}

/// Whether some calls need staging buffers.
bool exchange_state::may_stage() const {
    for (const row_direction direction : {row_direction::gather, row_direction::scatter}) {
        for (const ids_in ids : {ids_in::host_memory, ids_in::device_memory}) {
            const rated_plan planned = plan_call(setup_.facts_of({direction, calls_->max_rows(), ids}));
            if (planned.plan.find(transfer::staged) != nullptr) return true;
        }
    }
    return has_tuned_staged_plan(setup_.facts_of({.count = 1}), setup_.device);
}

row_plan exchange_state::plan(row_direction direction, std::uint64_t batch_rows, unsigned batches) const {
    constexpr double nearly = 0.97;
    // larger counts are planned like the largest call
    const std::uint64_t max_rows = calls_->max_rows();
    batch_rows = std::clamp<std::uint64_t>(batch_rows, 1, max_rows);
    const std::uint64_t count = std::min(saturated(batch_rows, std::max(batches, 1U)), max_rows);
    row_plan chosen = public_form(plan_of({direction, count}), setup_.options);
    std::vector<double> rates;
    for (const std::uint64_t group : counts_of_groups(setup_.table.row_size_bytes(), batch_rows, max_batches))
        rates.push_back(plan_of({direction, group}).gbps);
    const double best = std::ranges::max(rates);
    const auto enough =
        std::ranges::find_if(rates, [=](double rate) { return rate >= nearly * best; }) - rates.begin();
    chosen.batches = 1U << enough;
    return chosen;
}

void exchange_state::tune(std::uint64_t batch_rows, unsigned batches) {
    pending_calls begun;
    const auto gather_async = [&](const transfer_plan& plan, std::span<const std::uint64_t> ids,
                                  std::byte* rows) {
        const row_batch only{row_ids(ids), rows};
        const pending_calls calls = enqueue({.direction = row_direction::gather,
                                             .batches = {&only, 1},
                                             .policy = duplicate_policy::last,
                                             .stream = own_stream_,
                                             .is_listed = false},
                                            *calls_, &plan);
        begun.insert(begun.end(), calls.begin(), calls.end());
    };
    const auto finish = [&] {
        own_stream_.synchronize();
        for (const std::shared_ptr<pending_call>& call : std::exchange(begun, {}))
            calls_->check(*call);
    };
    check_source();
    const row_table& table = setup_.table;
    const timed_gathers gathers{table.row_count(), own_stream_, gather_async, finish};
    batch_rows = std::clamp<std::uint64_t>(batch_rows, 1, calls_->max_rows());
    for (const std::uint64_t count :
         counts_of_groups(table.row_size_bytes(), batch_rows, std::clamp(batches, 1U, max_batches))) {
        if (count > calls_->max_rows()) break;
        for (const row_direction direction : {row_direction::gather, row_direction::scatter}) {
            if (direction == row_direction::scatter && !table.writable()) continue;
            for (const ids_in ids : {ids_in::host_memory, ids_in::device_memory}) {
                const call_facts call = setup_.facts_of({direction, count, ids});
                if (!has_choice(call)) continue;
                if (!call.is_file_backed && tries_staging(call)) reserve_staging();
                tune_call(call, gathers);
            }
        }
    }
}

}  // namespace pinflow::detail
