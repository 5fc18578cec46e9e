#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "src/core/checked.hpp"
#include "src/rows/exchange_state.hpp"
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

call_facts exchange_setup::facts_of(row_direction direction, std::uint64_t count, bool has_host_ids) const {
    return {.is_scatter = direction == row_direction::scatter,
            .on_host = device.kind() == device_kind::host,
            .has_host_ids = has_host_ids,
            .is_aligned = is_aligned(table.data(), table.row_size_bytes()),
            .is_file_backed = is_file_backed(),
            .count = count,
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

rated_plan exchange_state::plan_of(row_direction direction, std::uint64_t count, bool has_host_ids) const {
    const call_facts call = setup_.facts_of(direction, count, has_host_ids);
    if (std::optional<transfer_plan> decided = plan_call(call)) return {*std::move(decided), 0};
    std::optional<rated_plan> tuned = tuned_plan(call, setup_.device);
    // another exchange may have been tuned after this one was made without staging buffers
    if (tuned && (rings_.has_some() || tuned->plan.find(transfer::staged) == nullptr))
        return *std::move(tuned);
    return {plan_by_sizes(call), 0};
}

/// Whether some calls need staging buffers.
bool exchange_state::may_stage() const {
    for (const row_direction direction : {row_direction::gather, row_direction::scatter}) {
        for (const bool has_host_ids : {true, false}) {
            const call_facts call = setup_.facts_of(direction, calls_->max_rows(), has_host_ids);
            const std::optional<transfer_plan> decided = plan_call(call);
            if ((decided ? *decided : plan_by_sizes(call)).find(transfer::staged) != nullptr) return true;
        }
    }
    return has_tuned_staged_plan(setup_.facts_of(row_direction::gather, 1, true), setup_.device);
}

row_plan exchange_state::plan(row_direction direction, std::uint64_t batch_rows, unsigned batches) const {
    constexpr double nearly = 0.97;
    // larger counts are planned like the largest call
    const std::uint64_t max_rows = calls_->max_rows();
    batch_rows = std::clamp<std::uint64_t>(batch_rows, 1, max_rows);
    const std::uint64_t count = std::min(saturated(batch_rows, std::max(batches, 1U)), max_rows);
    row_plan chosen = public_form(plan_of(direction, count, true), setup_.options);
    std::vector<double> rates;
    for (const std::uint64_t group : counts_of_groups(setup_.table.row_size_bytes(), batch_rows, max_batches))
        rates.push_back(plan_of(direction, group, true).gbps);
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
        const pending_calls calls = enqueue(
            {row_direction::gather, {&only, 1}, duplicate_policy::last, own_stream_, false}, *calls_, &plan);
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
            for (const bool has_host_ids : {true, false}) {
                const call_facts call = setup_.facts_of(direction, count, has_host_ids);
                if (plan_call(call)) continue;
                if (!call.is_file_backed && tries_staging(call)) reserve_staging();
                tune_call(call, gathers);
            }
        }
    }
}

}  // namespace pinflow::detail
