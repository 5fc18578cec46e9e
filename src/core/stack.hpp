#pragma once

#include <memory>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/row_source.hpp"

/// Makes whole arrays the rows of a larger array.
namespace pinflow::detail {

/// A whole array as one row; the array may have no axes, or be in Fortran order. Big-endian elements are
/// delivered little-endian, and elements in Fortran order are reordered to C order; such a row has no extent.
std::shared_ptr<const row_source> one_row_of(const array& source);

/// All rows of a source as one row. Has an extent if the source has exactly one, of contiguous rows.
/// @throws invalid_argument if the row has 2^63 bytes or more.
std::shared_ptr<const row_source> one_row_of(std::shared_ptr<const row_source> source);

/// Concatenates sources of one row each.
/// @throws as pinflow::stack.
std::shared_ptr<const row_source> stack_rows(std::vector<std::shared_ptr<const row_source>> rows);

}  // namespace pinflow::detail
