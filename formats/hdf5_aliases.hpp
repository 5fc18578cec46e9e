#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace pinflow::detail {

/// An alias is a further hard link of a dataset.
struct hdf5_alias {
    std::string name;
    std::string dataset;  ///< the name under which list_hdf5 lists it
};

/// Lists the hard links of datasets under which list_hdf5 does not list them. Of a group with several hard
/// links, only the first is searched.
/// @throws as list_hdf5.
std::vector<hdf5_alias> list_hdf5_aliases(const std::filesystem::path& path);

}  // namespace pinflow::detail
