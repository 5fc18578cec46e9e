#pragma once

#include "pinflow/dlpack.hpp"
#include "pinflow/dtype.hpp"

namespace pinflow::detail {

/// The counterpart of dlpack::type_of.
/// @throws unsupported for types that pinflow does not have.
dtype element_type(const dlpack::data_type& type);

}  // namespace pinflow::detail
