#pragma once

#include <string_view>

namespace pinflow {

/// How rows travel from the file to the device.
enum class route {
    automatic,  ///< the fastest that this machine allows
    direct,     ///< where they lie: on the host a view of the mapping (sequential order only; truncation can
                ///< then fault); on CUDA the device itself reads registered pages into the slot, in any order
    copy,       ///< the copy engine reads registered pages, pieces of a file of less than 32 KiB are staged;
                ///< on the host: read from the file into the slot
    staged,     ///< gathered by the CPU into a pinned slot, then copied by the device's stream
    read,       ///< read from the file into a pinned slot, whether or not it is mapped
};

/// "auto", "direct", "copy", "staged", "read".
std::string_view to_string(route route) noexcept;

}  // namespace pinflow
