#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "pinflow/formats/listing.hpp"

namespace pinflow::detail {

/// A further hard link of a dataset, or a soft link to it.
struct hdf5_alias {
    std::string name;
    std::string dataset;  ///< the name under which list_hdf5 lists it
};

/// Lists the links to datasets under which list_hdf5 does not list them. Of a group with several links, only
/// the first hard link is searched.
/// @throws as list_hdf5.
std::vector<hdf5_alias> list_hdf5_aliases(const std::filesystem::path& path);

/// Finds the dataset `name` without listing the others.
/// @return empty if there is no such dataset, it cannot be read, or a group on its path is reached by a soft
/// link or has several hard links. Only a list of all datasets can tell then.
std::optional<array_listing> find_listed_dataset(const std::filesystem::path& path, const std::string& name);

}  // namespace pinflow::detail
