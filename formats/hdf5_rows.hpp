#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "formats/hdf5_description.hpp"
#include "formats/hdf5_memory.hpp"
#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/element_stream.hpp"

/// The data of HDF5 datasets, of which everything is known already: read without libhdf5, but for those that
/// only it can read. The description is checked against itself and the file as it is now.
namespace pinflow::detail {

/// Reads rows of a dataset by libhdf5, `count` of them from `first_row` on, in the byte order that the
/// description has (hdf5_library_reader::read). A dataset without axes is one row. Called from any thread,
/// also from several at once.
using hdf5_read_function =
    std::function<void(std::uint64_t first_row, std::uint64_t count, std::span<std::byte> destination)>;

/// One dataset of an open file.
struct hdf5_dataset {
    std::shared_ptr<const input_file> file;
    std::shared_ptr<const hdf5_description> description;
    hdf5_read_function library;  ///< for storage that only libhdf5 can read; may be empty for all other
};

/// Its rows. A contiguous dataset has one extent, and chunks without filters that hold whole rows have some;
/// everything else is read by `read_rows`, in memory that it may share with other datasets.
/// @throws format_error, unsupported (also for a dataset without axes).
std::shared_ptr<const row_source> make_hdf5_rows(const hdf5_dataset& dataset,
                                                 std::shared_ptr<hdf5_memory> memory);

/// All of its rows as one row, also of a dataset without axes. @throws as make_hdf5_rows and make_hdf5_array.
std::shared_ptr<const row_source> make_hdf5_row(const hdf5_dataset& dataset,
                                                std::shared_ptr<hdf5_memory> memory);

/// All of it: a contiguous dataset mapped where it lies, everything else decoded into memory, in the byte
/// order that the description has. @throws as make_hdf5_rows and row_source::read_rows; system_failure when
/// there is too little memory.
array make_hdf5_array(const hdf5_dataset& dataset);

/// Its elements from the front to the back, read ahead as far as `memory_bytes` allows: each chunk is decoded
/// once where so much memory holds all rows that its band of chunks has.
std::unique_ptr<element_stream> make_hdf5_elements(const hdf5_dataset& dataset, std::uint64_t memory_bytes);

}  // namespace pinflow::detail
