#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "formats/hdf5_description.hpp"
#include "formats/hdf5_memory.hpp"
#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/element_stream.hpp"

/// Reads the data of HDF5 datasets from their descriptions: without libhdf5, unless only libhdf5 can read it.
/// Each description is checked against itself and the current file.
namespace pinflow::detail {

class hdf5_chunk_reader;

/// Reads rows of a dataset with libhdf5, and boxes if it can, in the byte order of the description
/// (hdf5_library_reader). Called from any thread, also from several at once.
class hdf5_read_function {
 public:
    using rows_function =
        std::function<void(std::uint64_t first_row, std::uint64_t count, std::span<std::byte> destination)>;
    using box_function =
        std::function<void(std::span<const std::uint64_t> first, std::span<const std::uint64_t> lengths,
                           std::span<std::byte> destination)>;

    hdf5_read_function() = default;
    /// @param box may be empty
    template <typename Rows>
        requires std::convertible_to<Rows, rows_function>
    hdf5_read_function(Rows rows, box_function box = {}) : rows_(std::move(rows)), box_(std::move(box)) {}

    explicit operator bool() const noexcept { return static_cast<bool>(rows_); }
    /// Reads `count` rows, from `first_row` on. A dataset without axes is one row.
    void operator()(std::uint64_t first_row, std::uint64_t count, std::span<std::byte> destination) const {
        rows_(first_row, count, destination);
    }
    bool reads_boxes() const noexcept { return static_cast<bool>(box_); }
    /// Reads `lengths` elements along each axis, from `first` on. Only if it reads boxes.
    void read_box(std::span<const std::uint64_t> first, std::span<const std::uint64_t> lengths,
                  std::span<std::byte> destination) const {
        box_(first, lengths, destination);
    }

 private:
    rows_function rows_;
    box_function box_;
};

/// One dataset of an open file.
struct hdf5_dataset {
    std::shared_ptr<const input_file> file;
    std::shared_ptr<const hdf5_description> description;
    hdf5_read_function library;  ///< for storage that only libhdf5 can read; may be empty for any other
};

/// Makes a source of the dataset's rows. A contiguous little-endian dataset has one extent. Unfiltered chunks
/// of whole little-endian rows are extents if all chunks were written. All other rows are read with
/// `read_rows`, in `memory`, which may be shared with other datasets.
/// @throws format_error; unsupported (also for a dataset without axes); system_failure if decoding one chunk
/// takes more memory than there is.
std::shared_ptr<const row_source> make_hdf5_rows(const hdf5_dataset& dataset,
                                                 std::shared_ptr<hdf5_memory> memory);

/// Makes a source in which all rows of the dataset are one row; the dataset may have no axes.
/// @throws as make_hdf5_rows; for a dataset without axes, as make_hdf5_array.
std::shared_ptr<const row_source> make_hdf5_row(const hdf5_dataset& dataset,
                                                std::shared_ptr<hdf5_memory> memory);

/// Makes an array of the whole dataset. A contiguous dataset is mapped in place; any other is decoded into
/// memory, in the byte order of the description.
/// @throws as make_hdf5_rows, but not for a dataset without axes; as row_source::read_rows; system_failure if
/// there is too little memory.
array make_hdf5_array(const hdf5_dataset& dataset);

/// Makes a stream of the dataset's elements, which reads ahead by at most `memory_bytes` (at least 64 KiB,
/// and one row if rows cannot be split). For a chunked dataset, half of the memory is for rows read
/// ahead: if that half holds all rows of a band of chunks, each chunk is decoded once. The other half, at
/// most 256 MiB, is for decoding. A contiguous dataset is streamed as stream_elements does.
/// @throws as make_hdf5_array, when it is made or when it is read.
/// @param reader of this dataset, if it is chunked; null: one that keeps no decoded chunks.
std::unique_ptr<element_stream> make_hdf5_elements(const hdf5_dataset& dataset, std::uint64_t memory_bytes,
                                                   std::shared_ptr<const hdf5_chunk_reader> reader = nullptr);

/// Makes a reader of a chunked dataset that keeps decoded chunks in `memory`, for several element streams.
/// @throws as make_hdf5_array.
std::shared_ptr<const hdf5_chunk_reader> make_hdf5_chunk_reader(const hdf5_dataset& dataset,
                                                                std::shared_ptr<hdf5_memory> memory);

}  // namespace pinflow::detail
