#pragma once

#include <cstdint>

#include "src/rows/exchange_state.hpp"

namespace pinflow::detail {

/// What is to be moved.
struct row_workload {
    row_direction direction = row_direction::gather;
    std::uint64_t count = 0;  ///< rows, of all batches
    unsigned batches = 1;
    bool host_ids = true;
};

/// Chooses how an exchange moves rows: the route that its options force, or the fastest of what can work, by
/// measurements that are made once in a process for a device, a direction, and sizes of the same magnitude.
/// Called with the exchange's lock held.
row_plan plan_rows(exchange_state& exchange, const row_workload& workload);

}  // namespace pinflow::detail
