#pragma once

#include <span>

#include "src/rows/row_call.hpp"

/// The checks of a call of a row exchange before anything is enqueued.
namespace pinflow::detail {

/// Checks all of a call but its indices.
/// @throws invalid_argument and unsupported, as row_exchange says.
void check_request(const exchange_setup& setup, const call_request& request);

/// Checks the indices that calls have copied from host memory.
/// @throws invalid_argument if some are outside the table.
void check_ids(const row_table& table, std::span<const row_call> calls);

/// The element type of a sum.
/// @throws unsupported for elements that cannot be added up.
sum_type sum_type_of(const dtype& type);

}  // namespace pinflow::detail
