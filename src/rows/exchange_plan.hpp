#pragma once

#include <cstdint>

#include "src/rows/exchange_state.hpp"
#include "src/rows/transfer_planner.hpp"

/// The facts about an exchange's calls, and the rates that are measured for them.
namespace pinflow::detail {

/// What is to be moved.
struct row_workload {
    row_direction direction = row_direction::gather;
    std::uint64_t count = 0;  ///< rows, of all batches together
    bool host_ids = true;
};

call_facts facts_of(const exchange_state& exchange, row_direction direction, bool host_ids);

/// How many rows calls of `count` rows are measured with: 1 at least.
std::uint64_t measured_rows(const row_table& table, std::uint64_t count) noexcept;

/// The plan for a call. If rates decide, they are measured once in a process for all exchanges that are alike
/// in what rates depend on, sizes by their magnitude. If the device has no memory left to measure in, the
/// plan is a direct one, and that is not tried again. Called with the exchange's lock held.
/// @throws fatal_device_error.
rated_plan plan_rows(exchange_state& exchange, const row_workload& workload);

/// How many batches like this one are worth taking together: the fewest, a power of two up to 64, that come
/// within 3 % of the best rate; 1 if nothing is measured. Called as `plan_rows`.
unsigned batches_worth_taking(exchange_state& exchange, const row_workload& batch);

/// A plan as the public interface tells it.
row_plan to_row_plan(const rated_plan& rated);

}  // namespace pinflow::detail
