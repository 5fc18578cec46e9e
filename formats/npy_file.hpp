#pragma once

#include <memory>

#include "pinflow/array.hpp"
#include "pinflow/file.hpp"

namespace pinflow::detail {

/// Whether an array of a file gets a mapping of its own, or is one of many that are mapped together later.
enum class array_mapping : bool { own, later };

/// As open_npy, of a file that is open already.
array open_npy_file(std::shared_ptr<const input_file> file, array_mapping mapping);

}  // namespace pinflow::detail
