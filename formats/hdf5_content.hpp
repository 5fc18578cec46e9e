#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/hdf5_chunk_reader.hpp"
#include "formats/hdf5_rows.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::detail {

/// The rows of a dataset however it is stored, but contiguously; one without axes is one row. Thread-safe.
class hdf5_content {
 public:
    hdf5_content() = default;
    hdf5_content(const hdf5_content&) = delete;
    hdf5_content& operator=(const hdf5_content&) = delete;
    virtual ~hdf5_content() = default;

    /// Fills `destination` with the rows of all `runs`, which are within the shape. @return the time that
    /// storage took.
    virtual std::chrono::nanoseconds read(std::span<const hdf5_row_run> runs,
                                          std::span<std::byte> destination) const = 0;
    /// Where rows lie in the file as they are delivered, mapped where the system allows it; mostly nowhere.
    /// What was mapped lives as long as this. To be called once.
    virtual std::vector<row_extent> map_extents() { return {}; }
    /// As row_source::no_extents_reason.
    virtual std::string no_extents_reason() const = 0;
};

/// Of a dataset that has passed the check. @throws as make_hdf5_rows.
std::unique_ptr<hdf5_content> open_hdf5_content(const hdf5_dataset& dataset,
                                                const hdf5_reader_options& options);

/// @throws format_error when the description contradicts itself or the file.
void check_dataset(const hdf5_dataset& dataset);

/// @throws system_failure when `size_bytes` are more memory than can be had: see require_memory.
void check_fits_memory(const hdf5_dataset& dataset, std::uint64_t size_bytes);

}  // namespace pinflow::detail
