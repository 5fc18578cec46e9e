#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string_view>

#include "pinflow/row_source.hpp"

/// Rows of several HDF5 files that share the memory in which chunks are decoded and kept.
namespace pinflow::detail {

class hdf5_memory;

/// Makes an hdf5_memory of `size_bytes`, or of a quarter of the available memory if that is less. Null in a
/// build without HDF5.
std::shared_ptr<hdf5_memory> make_hdf5_memory(std::uint64_t size_bytes);

/// As pinflow::open_hdf5_rows.
std::shared_ptr<const row_source> open_hdf5_rows(const std::filesystem::path& path, std::string_view name,
                                                 std::shared_ptr<hdf5_memory> memory);
/// The whole dataset as one row; it may have no axes.
/// @throws as pinflow::open_hdf5_rows; for a dataset without axes, as pinflow::open_hdf5.
std::shared_ptr<const row_source> open_hdf5_row(const std::filesystem::path& path, std::string_view name,
                                                std::shared_ptr<hdf5_memory> memory);

}  // namespace pinflow::detail
