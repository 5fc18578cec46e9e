#pragma once

#include <cstdint>

#include "src/rows/exchange_state.hpp"

namespace pinflow::detail {

/// What is to be moved.
struct row_workload {
    row_direction direction = row_direction::gather;
    std::uint64_t count = 0;  ///< rows, of all batches together
    bool host_ids = true;
};

/// Thread blocks of kernels that have much to do for each byte: for rows that are not aligned, and for sums.
unsigned busy_blocks(const row_table& table) noexcept;

/// Whether rows are taken in the order of their places, equal ones once, by a route for which nothing was
/// measured.
bool usually_sorted(row_route route, row_direction direction, const row_table& table) noexcept;

/// A plan without a reason yet, with the thread blocks and the staged share that the exchange's options ask
/// for, or those that are usual.
row_plan plan_of(row_route route, bool sorted, const exchange_state& exchange, row_direction direction);

/// How many rows calls of `count` rows are measured with: 1 at least.
std::uint64_t measured_rows(const row_table& table, std::uint64_t count) noexcept;

/// A route, and what it is expected to do.
struct expected_rate {
    row_route route;
    double gbps;
};
/// How rows are best scattered where they are gathered at these rates, directly and through slots, and rows
/// in order at `link`; GB a second, 0 where that was not measured.
expected_rate judged_scatter(double direct_gather, double staged_gather, double link) noexcept;

/// The fastest plan, by measurements that are made once in a process for all exchanges that are alike in what
/// rates depend on; sizes by their magnitude. For a table of some bytes that the device reaches. Where the
/// device has no memory left to measure in, the plan is a direct one, and that is not tried again. Called
/// with the exchange's lock held. @throws fatal_device_error.
row_plan measured_plan(exchange_state& exchange, const row_workload& workload);

}  // namespace pinflow::detail
