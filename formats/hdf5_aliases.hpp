#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace pinflow::detail {

/// A further hard link of a dataset.
struct hdf5_alias {
    std::string name;
    std::string dataset;  ///< the name under which list_hdf5 lists it
};

/// Lists the hard links of datasets that list_hdf5 leaves out. A group with several hard links is searched
/// under the first one only.
/// @throws as list_hdf5.
std::vector<hdf5_alias> list_hdf5_aliases(const std::filesystem::path& path);

}  // namespace pinflow::detail
