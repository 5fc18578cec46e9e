#pragma once

#include "src/rows/exchange_state.hpp"
#include "src/rows/measured_plan.hpp"

namespace pinflow::detail {

/// Chooses how an exchange moves rows: the route that its options force, or the fastest of what can work, by
/// measurements that are made once. Called with the exchange's lock held.
row_plan plan_rows(exchange_state& exchange, const row_workload& workload);

/// How many batches like this one are worth taking together: the fewest, a power of two up to 64, that come
/// within 3 % of the best rate; 1 where nothing is measured. Called as `plan_rows`.
unsigned batches_worth_taking(exchange_state& exchange, const row_workload& batch);

}  // namespace pinflow::detail
