#pragma once

#include "pinflow/row_source.hpp"

namespace pinflow::detail {

/// Finds out whether what a source says of itself fits together, before anything is sized or read by it.
/// @throws invalid_argument, naming the source and the numbers, when the size of a row is not what its shape
/// and type take, when sizes overflow 64 bits, and when there are extents whose rows are not as many as the
/// source's, that lie neither in a file nor in memory, or reach past the end of their file.
void check_row_source(const row_source& source);

}  // namespace pinflow::detail
