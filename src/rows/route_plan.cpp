#include "src/rows/route_plan.hpp"

#include <string>

namespace pinflow::detail {

transfer_plan plan_of(const call_route& chosen, const call_facts& call) {
    // direct scatters on the host device write rows in the order of the batch
    const bool is_in_batch_order = call.is_scatter && call.on_host && chosen.route == row_route::direct;
    const bool sorted =
        !is_in_batch_order && (chosen.is_sorted || call.is_scatter || chosen.route == row_route::hybrid);
    if (chosen.route == row_route::copy) return only({transfer::copy_engine}, std::string(chosen.reason));
    if (chosen.route == row_route::staged)
        return only({.how = transfer::staged, .sorted = sorted}, std::string(chosen.reason));
    const unsigned blocks = call.blocks != 0 ? call.blocks : default_blocks(call);
    transfer_plan plan =
        only({.how = transfer::kernel, .sorted = sorted, .blocks = blocks}, std::string(chosen.reason));
    if (chosen.route != row_route::hybrid) return plan;
    const double share = call.staged_share != 0 ? call.staged_share : chosen.staged_share;
    plan.parts.front().share = 1 - share;
    plan.parts.push_back({.how = transfer::staged, .share = share, .sorted = sorted});
    return plan;
}

unsigned default_blocks(const call_facts& call) noexcept {
    if (!call.is_aligned) return busy_blocks(call);
    if (call.is_scatter) {
        if (call.row_bytes >= thresholds.min_long_scatter_bytes) return thresholds.long_scatter_blocks;
        const bool is_large = call.table_bytes > thresholds.large_table_bytes;
        return is_large ? busy_blocks(call) : thresholds.usual_blocks;
    }
    const bool is_long = call.row_bytes >= thresholds.min_long_bytes;
    return is_long ? thresholds.long_gather_blocks : thresholds.usual_blocks;
}

unsigned busy_blocks(const call_facts& call) noexcept {
    if (call.row_bytes >= thresholds.min_long_bytes) return thresholds.busy_long_blocks;
    return call.table_bytes > thresholds.large_table_bytes ? thresholds.busy_large_blocks
                                                           : thresholds.busy_blocks;
}

bool tries_staging(const call_facts& call) noexcept {
    return call.staging_buffer_bytes >= thresholds.min_staging_bytes;
}

}  // namespace pinflow::detail
