#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"

namespace pinflow {

/// Consecutive rows that lie as they are delivered: C order, little-endian, one after the other.
struct row_extent {
    std::shared_ptr<const input_file> file;  ///< null when the rows exist in memory only
    std::uint64_t offset_bytes = 0;          ///< of the first row, in the file
    std::uint64_t row_count = 0;
    const std::byte* data = nullptr;  ///< the first row in the address space; null when it is not mapped
};

/// Rows of one type and shape, numbered from 0: all that formats and loaders know of each other. A row is one
/// index along the first axis of an array. Every member may be called from any thread at the same time.
/// Loaders and tables refuse a source whose sizes, row counts and extents disagree.
class row_source {
 public:
    row_source() = default;
    row_source(const row_source&) = delete;
    row_source& operator=(const row_source&) = delete;
    virtual ~row_source() = default;

    /// The type of the delivered elements; always little-endian.
    virtual const pinflow::dtype& dtype() const noexcept = 0;
    /// The shape of one row, in elements; empty when a row is one element.
    virtual const shape_vector& row_shape() const noexcept = 0;
    virtual std::uint64_t row_count() const noexcept = 0;
    virtual std::uint64_t row_size_bytes() const noexcept = 0;
    /// What it is, for messages: a path, or "an array in memory".
    virtual std::string description() const = 0;
    /// All rows, as extents in order of their numbers; empty when rows can only be had through `read_rows`.
    virtual std::span<const row_extent> extents() const noexcept = 0;
    /// Why there are no extents, to follow the description ("is big-endian, ..."). Empty if there are
    /// extents, or if the reason is unknown.
    virtual std::string no_extents_reason() const { return {}; }
    /// Whether the rows come from files that pinflow opened, so that `check_unchanged` notices when they are
    /// changed. False for rows in memory.
    virtual bool file_backed() const noexcept { return false; }
    /// Upper bound on the memory that this source takes: for decoded chunks that it keeps, and for decoding
    /// while rows are read. Sources that were opened by one call share it. 0 if the source only copies rows.
    virtual std::uint64_t memory_bytes() const noexcept { return 0; }

    /// Copies the rows `ids`, in that order, one after the other to host memory of ids.size() *
    /// row_size_bytes() bytes. Files are read with pread, so that a truncated file is an error and not a
    /// signal.
    /// @return the time spent waiting for storage; the rest of the call's time is the CPU's.
    /// @throws invalid_argument for an id past the end (nothing is read then), data_changed, system_failure.
    virtual std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                               std::span<std::byte> destination) const = 0;

    /// @throws data_changed when what the rows are read from is no longer what was opened.
    virtual void check_unchanged() const = 0;
};

/// The rows of several sources, one after the other, as one: files of one dataset. A single source is
/// returned as it is.
///
/// If the rows of all sources lie in files as they are delivered, the result keeps their extents, but not the
/// sources. It maps the files anew, side by side in one range of addresses: the pages of each follow those of
/// the one before, so that rows of equal files lie at a constant distance. A process maps at most half as
/// many files in this way as vm.max_map_count allows; the extents of further files have no `data`, and are
/// read.
///
/// Otherwise it keeps the sources. Its extents are those of all sources if every one has some, else there are
/// none.
/// @throws invalid_argument for an empty list, and when types or row shapes differ (the message names the
/// two), or the rows are more than 2^64; data_changed when a file is shorter than its extents;
/// system_failure when a file that was closed meanwhile cannot be opened again.
std::shared_ptr<const row_source> concatenate(std::vector<std::shared_ptr<const row_source>> sources);

/// Several sources as one, each of them as one row, as np.stack: files that hold one sample each. The shape
/// of a row is (row_count, row_shape...) of each source. Sources that have one extent each keep it, and are
/// mapped and kept as `concatenate` says; others are read whole for each row.
/// @throws as concatenate; invalid_argument also when the numbers of rows differ.
std::shared_ptr<const row_source> stack(std::vector<std::shared_ptr<const row_source>> sources);

}  // namespace pinflow
