#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string_view>

#include "pinflow/row_source.hpp"
#include "src/core/element_stream.hpp"

namespace pinflow::detail {

/// A file whose arrays are to be read element by element, one after the other: the directory of a .npz file,
/// and the header of a safetensors file, is read once, when this is made. Its streams may outlive it. Not
/// thread-safe.
class element_file {
 public:
    element_file() = default;
    element_file(const element_file&) = delete;
    element_file& operator=(const element_file&) = delete;
    virtual ~element_file() = default;

    /// The elements of the array of that name, as list_arrays tells it, or of that field of a .npy file's
    /// array. A deflated .npz member and HDF5's chunks are decoded on the way, never as a whole (except a
    /// member in Fortran order, as its elements come in that order only). `memory_bytes` bounds what
    /// reordering may take. @throws as pinflow::open.
    virtual std::unique_ptr<element_stream> stream(std::string_view name,
                                                   std::uint64_t memory_bytes) const = 0;
};

/// Of a file of any format that can be read. @throws as pinflow::open.
std::unique_ptr<element_file> open_elements(const std::filesystem::path& path);

/// Of rows, as one array without a name: those of a pattern's files.
std::unique_ptr<element_file> open_row_elements(std::shared_ptr<const row_source> rows);

/// Of a .npz file. `finish` checks a member's CRC-32, also when it is stored.
std::unique_ptr<element_file> open_npz_elements(const std::filesystem::path& path);

/// Of a safetensors file.
std::unique_ptr<element_file> open_safetensors_elements(const std::filesystem::path& path);

/// Of one dataset of an HDF5 file.
std::unique_ptr<element_stream> open_hdf5_elements(const std::filesystem::path& path, std::string_view name,
                                                   std::uint64_t memory_bytes);

}  // namespace pinflow::detail
