#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace pinflow::detail {

/// Spells a path within an HDF5 file as listings do: one slash between two names, and no others.
inline std::string hdf5_path(std::string_view path) {
    std::string result;
    while (!path.empty()) {
        const std::size_t end = std::min(path.find('/'), path.size());
        if (end > 0 && !result.empty()) result += '/';
        result += path.substr(0, end);
        path.remove_prefix(std::min(end + 1, path.size()));
    }
    return result;
}

}  // namespace pinflow::detail
