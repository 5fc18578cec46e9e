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

/// Consecutive rows that are stored as they are delivered: C order, little-endian, each row contiguous.
/// They start at equal distances, and may overlap or have gaps between them.
struct row_extent {
    std::shared_ptr<const input_file> file;  ///< null when the rows exist in memory only
    std::uint64_t offset_bytes = 0;          ///< of the first row, in the file
    std::uint64_t row_count = 0;
    const std::byte* data = nullptr;  ///< the first row in the address space; null when it is not mapped
    /// Bytes from the start of a row to the start of the next. 0: the size of a row, so rows are contiguous.
    /// Less: rows overlap, as sliding windows do. More: there are gaps, as between the values of a field.
    std::uint64_t stride_bytes = 0;
};

/// Rows of one type and shape, numbered from 0: the interface between formats and loaders. A row is one index
/// along the first axis of an array. Every member may be called from any thread at the same time. Loaders and
/// tables refuse a source whose sizes, row counts and extents disagree, or whose type is not little-endian.
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
    /// A description for messages: "'a.npy'", "'a.npz:images'", or "an array in memory".
    virtual std::string description() const = 0;
    /// All rows, as extents in order of their numbers; empty if rows can only be read with `read_rows`.
    virtual std::span<const row_extent> extents() const noexcept = 0;
    /// Why there are no extents; follows the description in a sentence ("is big-endian, ..."). Empty if there
    /// are extents, or if the reason is unknown.
    virtual std::string no_extents_reason() const { return {}; }
    /// Whether the rows come from files that pinflow opened, so that `check_unchanged` detects changes. False
    /// for rows in memory.
    virtual bool file_backed() const noexcept { return false; }
    /// Upper bound, in bytes, on the memory that this source takes for cached decoded chunks and for
    /// decoding. Sources that one call opened share it. 0 if the source only copies rows.
    /// The result of `concatenate` or `stack` reports the maximum of the sources that it keeps, or 0 if it
    /// keeps none. The maximum is an upper bound only if one call opened them. Otherwise, use the sum of the
    /// sources.
    virtual std::uint64_t memory_bytes() const noexcept { return 0; }

    /// Copies the rows with the indices `ids`, in that order, to contiguous host memory of ids.size() *
    /// row_size_bytes() bytes. Files are read with pread, so that a truncated file is an error and not a
    /// signal.
    ///
    /// A loader calls it for the rows of one batch, or for parts of about 1 MiB of a long one, on as many
    /// threads at once as loader_options::threads and free slots allow. To identify the data,
    /// loader::state, batch::state and a loader with `resume_from` call it for up to 16 rows, on the calling
    /// thread. An implementation must not call either `state`.
    /// @return the time spent waiting for storage; the rest of the call is CPU time. If there are no extents
    /// and `memory_bytes` is 0, it may be 0: then the loader computes it from the thread's CPU clock.
    /// @throws invalid_argument for an index out of range (nothing is read then); data_changed,
    /// system_failure.
    virtual std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                               std::span<std::byte> destination) const = 0;

    /// Checks that the files are still the files that were opened.
    /// @throws data_changed if they are not.
    virtual void check_unchanged() const = 0;
};

/// Returns one source with the rows of several sources, in order: for a dataset of several files. A single
/// source is returned as it is.
///
/// If the files hold the rows of all sources as they are delivered, and contiguous, the result keeps their
/// extents, but not the sources. It maps the files again, side by side in one address range: the pages
/// of each file follow the pages of the file before, so that rows of files of equal size are at a constant
/// distance. A process maps at most vm.max_map_count / 2 files in this way; the extents of further files have
/// no `data`, and are read.
///
/// Otherwise the result keeps the sources. Its extents are the extents of all sources if every source that
/// has rows has some; otherwise it has none.
/// @throws invalid_argument for an empty list, if types or row shapes differ (the message names the two), or
/// if there are 2^64 rows or more.
/// @throws data_changed if a file is shorter than its extents.
/// @throws system_failure if a file that was closed meanwhile cannot be opened again.
std::shared_ptr<const row_source> concatenate(std::vector<std::shared_ptr<const row_source>> sources);

/// Returns one source in which each of `sources` is one row, as np.stack does: for files of one sample each.
/// The shape of a row is the row count of a source, followed by its row shape. If every source has exactly
/// one extent, of contiguous rows, the result has these extents, mapped as `concatenate` does.
/// Otherwise it has none, and a source is read as a whole for each row.
/// @throws as concatenate; invalid_argument also if the row counts differ.
std::shared_ptr<const row_source> stack(std::vector<std::shared_ptr<const row_source>> sources);

}  // namespace pinflow
