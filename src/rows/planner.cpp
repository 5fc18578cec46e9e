#include "src/rows/planner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "src/core/checked.hpp"

namespace pinflow::detail {

namespace {

row_plan forced(const exchange_state& exchange, row_direction direction) {
    const row_route route = exchange.options().route;
    const bool sorted = usually_sorted(route, direction, exchange.table());
    row_plan plan = plan_of(route, sorted, exchange, direction);
    plan.reason = "asked for";
    return plan;
}

row_plan chosen(exchange_state& exchange, const row_workload& workload) {
    const bool sorted = workload.direction == row_direction::scatter;
    const auto only = [&](row_route route, std::string_view reason) {
        row_plan plan = plan_of(route, sorted, exchange, workload.direction);
        plan.reason = reason;
        return plan;
    };
    if (!exchange.reached()) return only(row_route::staged, exchange.why_not_reached());
    if (exchange.device().kind() == device_kind::host) {
        if (exchange.reads_file()) {
            return only(row_route::staged,
                        "rows of a file are read, as touching those of one that was truncated is a fault");
        }
        return only(row_route::direct, "the host device copies rows from where they lie to where they go");
    }
    if (exchange.table().size_bytes() == 0) return only(row_route::direct, "the table has no bytes");
    return measured_plan(exchange, workload);
}

/// Adds to the reason what of the plan the caller set.
void tell_what_was_set(row_plan& plan, const row_exchange_options& options) {
    if (options.blocks != 0 && plan.blocks != 0) {
        plan.reason += fmt::format("; {} thread blocks, as set", plan.blocks);
    }
    if (options.staged_share != 0 && plan.route == row_route::hybrid) {
        plan.reason += fmt::format("; {:.4g} of the rows staged, as set", plan.staged_share);
    }
}

}  // namespace

row_plan plan_rows(exchange_state& exchange, const row_workload& workload) {
    const row_exchange_options& options = exchange.options();
    row_plan plan = options.route == row_route::automatic ? chosen(exchange, workload)
                                                          : forced(exchange, workload.direction);
    tell_what_was_set(plan, options);
    return plan;
}

unsigned batches_worth_taking(exchange_state& exchange, const row_workload& batch) {
    constexpr unsigned most = 64;
    constexpr double nearly = 0.97;
    std::vector<double> rates;  // of 1, 2, 4, ... batches
    for (unsigned batches = 1; batches <= most; batches *= 2) {
        row_workload together = batch;
        together.count = saturated(batch.count, batches);
        if (batches > 1 && together.count > measured_rows(exchange.table(), together.count)) break;
        rates.push_back(plan_rows(exchange, together).gbps);
    }
    const double best = std::ranges::max(rates);
    const auto enough =
        std::ranges::find_if(rates, [=](double rate) { return rate >= nearly * best; }) - rates.begin();
    return 1U << enough;
}

}  // namespace pinflow::detail
