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

/// Rows that follow each other, and where they go.
struct hdf5_row_run {
    std::uint64_t first_row = 0;
    std::uint64_t row_count = 0;
    std::uint64_t position = 0;  ///< of the first one in the destination, counted in rows
};

/// The consecutive rows among `ids`, which may come in any order.
std::vector<hdf5_row_run> runs_of(std::span<const std::uint64_t> ids);

struct hdf5_reader_options {
    /// For decoded chunks that are kept for later calls, and for decoding, where a chunk counts three times:
    /// as it is stored, between filters, and decoded. Where there is not even room for one, one at a time is
    /// decoded. By default for those who read everything once.
    std::shared_ptr<hdf5_memory> memory = std::make_shared<hdf5_memory>(0, std::uint64_t{256} << 20);
    bool as_stored = false;  ///< leave byte order as it is, instead of making elements little-endian
};

/// Reads the elements of a chunked dataset: raw chunks with pread, decoded by as many cores as are free.
/// Thread-safe.
class hdf5_chunk_reader {
 public:
    /// Of a description that has passed its check. @throws format_error when a chunk is stored in more or
    /// fewer bytes than can be; unsupported for filters that are not known; each in a full sentence.
    hdf5_chunk_reader(std::shared_ptr<const input_file> file, std::shared_ptr<const hdf5_description> dataset,
                      const hdf5_reader_options& options);
    hdf5_chunk_reader(const hdf5_chunk_reader&) = delete;
    hdf5_chunk_reader& operator=(const hdf5_chunk_reader&) = delete;
    ~hdf5_chunk_reader();

    const hdf5_chunk_grid& grid() const noexcept { return grid_; }

    /// Fills `destination` with the `box` of the rows of all `runs`, each row taking box.row_bytes(). All of
    /// it is within the shape. Each chunk is decoded once, by this call or by another one that needs it just
    /// then.
    /// @return the part of the time that storage took. @throws format_error for damaged chunks, in a sentence
    /// that names the file, the chunk and its place; data_changed, system_failure.
    std::chrono::nanoseconds read(std::span<const hdf5_row_run> runs, const hdf5_row_box& box,
                                  std::span<std::byte> destination) const;

    /// How many chunks were decoded so far.
    std::uint64_t decoded_count() const noexcept { return decoded_count_; }

 private:
    friend class hdf5_chunk_read;

    void check_chunks() const;
    hdf5_chunk_key key_of(std::uint64_t index) const noexcept { return {number_, index}; }
    /// What a thread takes that decodes.
    std::uint64_t decoding_bytes() const noexcept { return 3 * grid_.chunk_bytes(); }
    /// "cannot read '/data/a.h5': the chunk at (0, 128) of 'group/data', 713 bytes at offset 2048, " and
    /// `what`.
    std::string sentence(std::uint64_t index, const std::string& what) const;

    std::shared_ptr<const input_file> file_;
    std::shared_ptr<const hdf5_description> dataset_;
    hdf5_chunk_grid grid_;
    hdf5_pipeline pipeline_;
    swap_plan swap_;
    std::vector<std::byte> fill_;  // in the byte order that is delivered
    std::shared_ptr<hdf5_memory> memory_;
    std::uint64_t number_;  // among those that share the memory
    bool keeps_all_;        // whether the cache has room for all chunks there are
    /// Of each chunk, whether it came into the cache before.
    mutable std::vector<std::atomic<bool>> was_decoded_;
    mutable std::atomic<std::uint64_t> decoded_count_ = 0;
};

}  // namespace pinflow::detail
