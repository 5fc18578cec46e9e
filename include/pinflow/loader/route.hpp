#pragma once

#include <string_view>

namespace pinflow {

/// How rows are copied from the file to the device. Small arrays that the loader holds on its device
/// (array_report::transfer is "held") keep their transfer, unless `direct` is set on the host.
enum class route {
    automatic,  ///< the fastest route that this machine allows
    /// In place. On CUDA a kernel reads registered pages into the slot, in any order. On the host, batches
    /// are views of the mapping: only in the sequential order, and only of contiguous rows mapped in one
    /// piece. Reading a view of a truncated file can raise SIGBUS. Rows of every view keep the alignment that
    /// they have in the file: most arrays in .npz files are not aligned for their type.
    direct,
    copy,    ///< the copy engine reads registered pages; pieces of a file below 32 KiB are staged; on the
             ///< host, the CPU copies rows into the slot (see fault_guard.hpp)
    staged,  ///< the CPU gathers rows into a staging buffer, from which the device's stream copies them
    read,    ///< read from the file, whether or not it is mapped: into a staging buffer for a GPU, directly
             ///< into the slot on the host
};

/// "auto", "direct", "copy", "staged", "read".
std::string_view to_string(route route) noexcept;

}  // namespace pinflow
