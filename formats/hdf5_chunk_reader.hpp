#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/hdf5_chunk_grid.hpp"
#include "formats/hdf5_description.hpp"
#include "formats/hdf5_filters.hpp"
#include "formats/hdf5_memory.hpp"
#include "pinflow/file.hpp"
#include "src/core/swap_plan.hpp"

namespace pinflow::detail {

/// Consecutive rows, and their position in the destination.
struct hdf5_row_run {
    std::uint64_t first_row = 0;
    std::uint64_t row_count = 0;
    std::uint64_t position = 0;  ///< of the first row in the destination, in rows
};

/// Groups `ids`, in any order, into runs of consecutive rows.
std::vector<hdf5_row_run> runs_of(std::span<const std::uint64_t> ids);

struct hdf5_reader_options {
    /// Memory for cached chunks and for decoding. Decoding takes three times the chunk size: stored, between
    /// filters, and decoded. If there is no room for even a single chunk, chunks are decoded one at a
    /// time, beyond the limit. The default suits readers that read everything once.
    std::shared_ptr<hdf5_memory> memory = std::make_shared<hdf5_memory>(0, std::uint64_t{256} << 20);
    bool as_stored = false;  ///< keep the stored byte order instead of converting to little-endian
};

/// Reads the elements of a chunked dataset: reads raw chunks with pread and decodes them on all free cores.
/// Thread-safe.
class hdf5_chunk_reader {
 public:
    /// `dataset` must have passed check_hdf5_description.
    /// @throws format_error if the shapes do not fit each other, for invalid filter parameters, and if the
    /// stored size of a chunk is impossible.
    /// @throws unsupported for unknown filters. All messages are full sentences.
    hdf5_chunk_reader(std::shared_ptr<const input_file> file, std::shared_ptr<const hdf5_description> dataset,
                      const hdf5_reader_options& options);
    hdf5_chunk_reader(const hdf5_chunk_reader&) = delete;
    hdf5_chunk_reader& operator=(const hdf5_chunk_reader&) = delete;
    ~hdf5_chunk_reader();

    const hdf5_chunk_grid& grid() const noexcept { return grid_; }

    /// Fills `destination` with the `box` of the rows of all `runs`; each row takes box.row_bytes(). Rows and
    /// box must be within the shape. Each chunk that is not cached is decoded once, by this call or by a
    /// concurrent call that needs it too.
    /// @return the part of the time spent waiting for storage.
    /// @throws format_error for damaged chunks (the message names the file, the chunk and its location);
    /// data_changed; system_failure, also if there is no memory for a chunk; std::bad_alloc.
    std::chrono::nanoseconds read(std::span<const hdf5_row_run> runs, const hdf5_row_box& box,
                                  std::span<std::byte> destination) const;

    /// The number of chunks decoded so far; unfiltered chunks are not counted.
    std::uint64_t decoded_count() const noexcept { return decoded_count_; }

 private:
    friend class hdf5_chunk_read;

    void check_chunks() const;
    hdf5_chunk_key key_of(std::uint64_t index) const noexcept { return {number_, index}; }
    /// Memory that a decoding thread takes.
    std::uint64_t decoding_bytes() const noexcept { return 3 * grid_.chunk_bytes(); }
    /// "cannot read '/data/a.h5': the chunk at (0, 128) of 'group/data', 713 bytes at offset 2048, " followed
    /// by `what`.
    std::string sentence(std::uint64_t index, const std::string& what) const;

    std::shared_ptr<const input_file> file_;
    std::shared_ptr<const hdf5_description> dataset_;
    hdf5_chunk_grid grid_;
    hdf5_pipeline pipeline_;
    swap_plan swap_;
    std::vector<std::byte> fill_;  // in the delivered byte order
    std::shared_ptr<hdf5_memory> memory_;
    std::uint64_t number_;  // of this reader, among the readers that share the memory
    bool keeps_all_;        // whether the cache has room for all chunks
    /// For each chunk, whether it was already decoded once into cacheable memory, cached or not.
    mutable std::vector<std::atomic<bool>> was_decoded_;
    mutable std::atomic<std::uint64_t> decoded_count_ = 0;
};

}  // namespace pinflow::detail
