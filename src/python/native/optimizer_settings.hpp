#pragma once

#include <map>
#include <string>

#include "pinflow/train/optimizer.hpp"

namespace pinflow::python {

/// Numbers by their names; true is 1.
using numbers_by_name = std::map<std::string, double>;

/// The default settings of `rule`, overridden by `numbers`, which have the names of torch.optim; pairs are
/// split by Python.
/// @throws invalid_argument if there is no such rule, or if it lacks one of the settings.
optimizer optimizer_of(const std::string& rule, const numbers_by_name& numbers);

}  // namespace pinflow::python
