#pragma once

#include <cstddef>
#include <memory>

#include "formats/hdf5_access.hpp"
#include "formats/hdf5_rows.hpp"

namespace pinflow::detail {

/// How many datasets that only libhdf5 can read are kept open at once: each holds a file open, or a process,
/// and up to hdf5_library_cache_bytes of memory.
inline constexpr std::size_t max_kept_hdf5_readers = 16;

/// Has `access` open a reader for `dataset`. It is closed when the function and its copies are gone, or when
/// others were used more lately and there are too many; it is then opened again for the next call.
/// @throws what hdf5_access::reader throws, as does the function.
hdf5_read_function keep_hdf5_reader(std::shared_ptr<hdf5_access> access, const hdf5_dataset& dataset);

}  // namespace pinflow::detail
