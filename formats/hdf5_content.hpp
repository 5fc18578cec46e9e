#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/hdf5_chunk_reader.hpp"
#include "formats/hdf5_rows.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::detail {

/// Reads the rows of a dataset of any storage but contiguous. A dataset without axes is one row. Thread-safe.
class hdf5_content {
 public:
    hdf5_content() = default;
    hdf5_content(const hdf5_content&) = delete;
    hdf5_content& operator=(const hdf5_content&) = delete;
    virtual ~hdf5_content() = default;

    /// Fills `destination` with the rows of all `runs`, which must be within the shape.
    /// @return the time spent waiting for storage; 0 if libhdf5 reads the rows, because that is not measured.
    /// @throws as hdf5_chunk_reader::read; what the dataset's `library` throws.
    virtual std::chrono::nanoseconds read(std::span<const hdf5_row_run> runs,
                                          std::span<std::byte> destination) const = 0;
    /// Whether read_box may be called.
    virtual bool reads_boxes() const noexcept { return false; }
    /// Fills `destination` with a box, `lengths` elements along each axis from `first` on, in C order.
    /// @throws as `read`; unsupported if it reads no boxes.
    virtual void read_box(std::span<const std::uint64_t> first, std::span<const std::uint64_t> lengths,
                          std::span<std::byte> destination) const;
    /// Returns the rows that the file holds as they are delivered, mapped if the system allows it; usually
    /// there are none. Mappings live as long as this object. Call it once.
    virtual std::vector<row_extent> map_extents() { return {}; }
    /// As row_source::no_extents_reason.
    virtual std::string no_extents_reason() const = 0;
};

/// Opens the content of a dataset that has passed check_dataset.
/// @throws format_error, unsupported.
std::unique_ptr<hdf5_content> open_hdf5_content(const hdf5_dataset& dataset,
                                                const hdf5_reader_options& options);

/// Checks the description against itself and the file.
/// @throws format_error if they contradict each other.
void check_dataset(const hdf5_dataset& dataset);

/// Checks that `size_bytes` of memory are available.
/// @throws system_failure if they are not; see require_memory.
void check_fits_memory(const hdf5_dataset& dataset, std::uint64_t size_bytes);

}  // namespace pinflow::detail
