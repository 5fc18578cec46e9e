#pragma once

#include "pinflow/train/embedding_table.hpp"
#include "src/device/record_work.hpp"

namespace pinflow::detail {

/// The type of weights and gradients.
/// @throws unsupported for a type that is not float32, float16 or bfloat16.
flat_type weight_type_of(const pinflow::dtype& type);

/// Where the parts of a record lie.
/// @throws invalid_argument for options out of range; unsupported for a type that weight_type_of rejects.
record_layout lay_out_record(const embedding_options& options);

}  // namespace pinflow::detail
