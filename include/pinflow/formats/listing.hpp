#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"

namespace pinflow {

/// What a file says of one array in it, before any of its data is touched.
struct array_listing {
    std::string name;                     ///< empty for the one array of a .npy file
    std::optional<pinflow::dtype> dtype;  ///< empty when it cannot be opened
    shape_vector shape;
    bool fortran_order = false;
    std::optional<std::uint64_t>
        offset_bytes;              ///< where the data lies in the file, when it lies there as it is
    std::uint64_t size_bytes = 0;  ///< of the payload
    bool mappable = false;
    /// One sentence: why it is mappable, why not, or why it cannot be opened at all.
    std::string reason;
};

}  // namespace pinflow
