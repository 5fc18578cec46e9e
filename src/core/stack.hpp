#pragma once

#include <memory>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/row_source.hpp"

/// Arrays that are rows of a larger one.
namespace pinflow::detail {

/// A whole array as one row, also one without axes or in Fortran order. Big-endian elements are delivered
/// little-endian, elements in another order in C order; such a row has no extent.
std::shared_ptr<const row_source> one_row_of(const array& source);

/// All rows of a source as one row. Has an extent if the source has exactly one.
/// @throws invalid_argument when such a row has 2^63 bytes or more.
std::shared_ptr<const row_source> one_row_of(std::shared_ptr<const row_source> source);

/// Sources of one row each, one after the other. @throws as pinflow::stack.
std::shared_ptr<const row_source> stack_rows(std::vector<std::shared_ptr<const row_source>> rows);

}  // namespace pinflow::detail
