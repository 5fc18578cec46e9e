#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string_view>

#include "src/core/element_stream.hpp"

namespace pinflow::detail {

/// The elements of the array `name` of a file of any format that can be read; a deflated .npz member
/// and HDF5's chunks are decoded on the way, never as a whole (except a member in Fortran order, as its
/// elements come in that order only). An empty name stands for a file's one array. @throws as pinflow::open.
std::unique_ptr<element_stream> open_elements(const std::filesystem::path& path, std::string_view name,
                                              std::uint64_t memory_bytes);

/// The same of one member of a .npz file, whose CRC-32 `finish` checks, also when it is stored.
std::unique_ptr<element_stream> open_npz_elements(const std::filesystem::path& path, std::string_view name,
                                                  std::uint64_t memory_bytes);

/// The same of one dataset of an HDF5 file, whose chunks are decoded on the way.
std::unique_ptr<element_stream> open_hdf5_elements(const std::filesystem::path& path, std::string_view name,
                                                   std::uint64_t memory_bytes);

}  // namespace pinflow::detail
