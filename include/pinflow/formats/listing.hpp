#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"

namespace pinflow {

/// The description of one array in a file, from metadata alone.
struct array_listing {
    std::string name;                     ///< empty for the array of a .npy file
    std::optional<pinflow::dtype> dtype;  ///< empty if it cannot be opened
    shape_vector shape;
    bool fortran_order = false;
    std::optional<std::uint64_t>
        offset_bytes;  ///< offset of the data; empty unless the file holds it uncompressed in one piece
    std::uint64_t size_bytes = 0;  ///< of all elements, uncompressed
    bool mappable = false;
    /// Of a chunked HDF5 dataset of at most 2^20 chunks, unless libhdf5 must read it. Otherwise empty.
    shape_vector chunk_shape = {};  // NOLINT(readability-redundant-member-init): g++ wants it
    /// One sentence: why the array is mappable, why it is not, or why it cannot be opened at all.
    std::string reason;
};

}  // namespace pinflow
