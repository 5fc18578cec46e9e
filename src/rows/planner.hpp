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

/// Chooses how an exchange moves rows: the route that its options force, or the fastest of what can work, by
/// measurements that are made once in a process for a device, a direction, and sizes of the same magnitude.
/// Called with the exchange's lock held.
row_plan plan_rows(exchange_state& exchange, const row_workload& workload);

/// How many batches like this one are worth taking together: the fewest, a power of two up to 64, that come
/// within 3 % of the best rate; 1 where nothing is measured. Called as `plan_rows`.
unsigned batches_worth_taking(exchange_state& exchange, const row_workload& batch);

}  // namespace pinflow::detail
