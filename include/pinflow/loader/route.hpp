#pragma once

#include <string_view>

namespace pinflow {

/// How rows are copied from the file to the device.
enum class route {
    automatic,  ///< the fastest route that this machine allows
    direct,     ///< in place: on the host a view of the mapping (sequential order only; reading a truncated
             ///< file can raise SIGBUS); on CUDA a kernel reads registered pages into the slot, in any order
    copy,    ///< the copy engine reads registered pages; pieces of a file below 32 KiB are staged; on the
             ///< host, the CPU copies rows into the slot (see fault_guard.hpp)
    staged,  ///< the CPU gathers rows into a staging buffer, from which the device's stream copies them
    read,    ///< read from the file, whether or not it is mapped: into a staging buffer for a GPU, directly
             ///< into the slot on the host
};

/// "auto", "direct", "copy", "staged", "read".
std::string_view to_string(route route) noexcept;

}  // namespace pinflow
