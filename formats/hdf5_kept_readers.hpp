#pragma once

#include <cstddef>
#include <memory>

#include "formats/hdf5_access.hpp"
#include "formats/hdf5_rows.hpp"

namespace pinflow::detail {

/// The maximum number of readers that are kept open, for datasets that only libhdf5 can read. Each one holds
/// a file or a process, and up to hdf5_library_cache_bytes of memory.
inline constexpr std::size_t max_kept_hdf5_readers = 16;

/// Opens a reader for `dataset` with `access`. The reader is closed when the function and its copies are
/// destroyed. If too many readers are open, the least recently used is closed, and reopened on its next call.
/// @throws what hdf5_access::reader throws; the returned function throws the same, and what reading throws.
hdf5_read_function keep_hdf5_reader(std::shared_ptr<hdf5_access> access, const hdf5_dataset& dataset);

}  // namespace pinflow::detail
