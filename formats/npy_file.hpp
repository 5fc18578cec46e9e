#pragma once

#include <memory>

#include "pinflow/array.hpp"
#include "pinflow/file.hpp"

namespace pinflow::detail {

/// Whether an array gets its own mapping, or is later mapped together with others.
enum class array_mapping : bool { own, later };

/// As open_npy, for a file that is already open.
array open_npy_file(std::shared_ptr<const input_file> file, array_mapping mapping);

}  // namespace pinflow::detail
