#pragma once

#include "pinflow/train/embedding_table.hpp"
#include "src/device/record_work.hpp"

namespace pinflow::detail {

/// @throws unsupported for a type that is not float32, float16 or bfloat16.
flat_type weight_type_of(const pinflow::dtype& type);

/// @throws invalid_argument for options out of range; unsupported for other types.
record_layout lay_out_record(const embedding_options& options);

}  // namespace pinflow::detail
