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

/// The rows of 1, 2, 4, ... and of `batches` batches, as far as more rows are measured with more.
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

call_facts exchange_state::facts_of(row_direction direction, std::uint64_t count, bool host_ids) const {
    return {.is_scatter = direction == row_direction::scatter,
            .on_host = device_.kind() == device_kind::host,
            .has_host_ids = host_ids,
            .is_aligned = is_aligned(table_.data(), table_.row_size_bytes()),
            .is_file_backed = is_file_backed(),
            .count = count,
            .row_bytes = table_.row_size_bytes(),
            .table_bytes = table_.size_bytes(),
            .threads = static_cast<unsigned>(thread_count()),
            .staging_buffer_bytes = staging_buffer_bytes(),
            .not_reached_reason = not_reached_reason_,
            .requested = options_.route,
            .staging_bytes = options_.staging_bytes,
            .blocks = options_.blocks,
            .staged_share = options_.staged_share};
}

rated_plan exchange_state::plan_of(row_direction direction, std::uint64_t count, bool host_ids) const {
    const call_facts call = facts_of(direction, count, host_ids);
    if (std::optional<transfer_plan> decided = plan_call(call)) return {*std::move(decided), 0};
    if (std::optional<rated_plan> tuned = tuned_plan(call, device_)) return *std::move(tuned);
    return {plan_by_sizes(call), 0};
}

row_plan exchange_state::plan(row_direction direction, std::uint64_t batch_rows, unsigned batches) const {
    constexpr double nearly = 0.97;
    // larger counts are planned like the largest call
    batch_rows = std::clamp<std::uint64_t>(batch_rows, 1, max_rows_of_call);
    const std::uint64_t count = std::min(saturated(batch_rows, std::max(batches, 1U)), max_rows_of_call);
    row_plan chosen = public_form(plan_of(direction, count, true), options_);
    std::vector<double> rates;
    for (const std::uint64_t group : counts_of_groups(table_.row_size_bytes(), batch_rows, max_batches))
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
        const batch only{row_ids(ids), rows};
        if (auto call =
                enqueue_as(plan, row_direction::gather, {&only, 1}, duplicate_policy::last, own_stream_))
            begun.push_back(std::move(call));
    };
    const auto finish = [&] {
        own_stream_.synchronize();
        for (const std::shared_ptr<pending_call>& call : std::exchange(begun, {}))
            errors_->check(*call);
    };
    check_source();
    const timed_gathers gathers{table_.row_count(), own_stream_, gather_async, finish};
    batch_rows = std::clamp<std::uint64_t>(batch_rows, 1, max_rows_of_call);
    for (const std::uint64_t count :
         counts_of_groups(table_.row_size_bytes(), batch_rows, std::clamp(batches, 1U, max_batches))) {
        for (const row_direction direction : {row_direction::gather, row_direction::scatter}) {
            if (direction == row_direction::scatter && !table_.writable()) continue;
            for (const bool host_ids : {true, false}) {
                const call_facts call = facts_of(direction, count, host_ids);
                if (!plan_call(call)) tune_call(call, gathers);
            }
        }
    }
}

}  // namespace pinflow::detail
