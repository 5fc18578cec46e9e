#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/load/load_plan.hpp"

/// Opens files and collects their tensors.
namespace pinflow::detail {

/// Opens the files by their headers, in parallel.
/// @param names load_options::names. With one name and one HDF5 file, other datasets are not listed if
/// find_listed_dataset finds it.
/// @throws as the constructor of tensor_files.
std::shared_ptr<opened_tensors> open_tensors(std::vector<std::filesystem::path> paths,
                                             std::span<const std::string> names = {});
/// The same, with descriptions for the user.
std::shared_ptr<const opened_tensors> open_and_describe(std::vector<std::filesystem::path> paths);

}  // namespace pinflow::detail
