#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "formats/hdf5_chunk_reader.hpp"

namespace pinflow::detail {

/// One call of hdf5_chunk_reader::read. Its work is a list of parts of chunks. Tasks take one part after the
/// other; their number is limited by the cores, the work and the memory.
class hdf5_chunk_read final : public hdf5_chunk_cache::user {
 public:
    hdf5_chunk_read(const hdf5_chunk_reader& reader, std::span<const hdf5_row_run> runs,
                    const hdf5_row_box& box, std::span<std::byte> destination);

    std::chrono::nanoseconds run();

    void use(std::size_t work, const hdf5_chunk_bytes& chunk) noexcept override;
    void ask_again(std::size_t work) noexcept override;

 private:
    /// Consecutive rows of one band.
    struct segment {
        std::uint64_t band;
        std::uint64_t first;  ///< in the band
        std::uint64_t count;
        std::uint64_t position;  ///< in the destination, in rows
    };
    /// The state of one thread.
    class worker;
    class decoding_permit;

    std::size_t work_count() const noexcept { return bands_.size() * box_.part_count(); }
    /// The segments of a piece of work.
    std::span<const segment> segments_of(std::size_t work) const noexcept;
    hdf5_chunk_part part_of(std::size_t work) const noexcept { return box_.part(work % box_.part_count()); }
    std::uint64_t chunk_of(std::size_t work, const hdf5_chunk_part& part) const noexcept;

    void run_tasks(std::span<const std::size_t> works);
    void run_task(std::span<const std::size_t> works);
    /// Waits for the chunks that other threads have promised, and does the work whose promise failed.
    void finish();
    void wait_for_promises() noexcept;

    void do_work(std::size_t work, worker& mine);
    bool do_without_decoding(std::size_t work, worker& mine);
    bool read_in_place(std::size_t work, const hdf5_chunk_part& part, worker& mine);
    void read_rows_in_place(const segment& rows, const hdf5_chunk_part& part, std::uint64_t offset_bytes,
                            worker& mine);
    void decode(std::size_t work, std::uint64_t index, worker& mine);
    void decode_into(std::uint64_t index, std::span<std::byte> chunk, bool stays_shuffled, worker& mine);
    /// The element size if only the elements that the work needs should be unshuffled; 0 to unshuffle the
    /// whole chunk.
    std::uint64_t shuffle_element_bytes_for(std::size_t work, std::uint64_t index,
                                            const hdf5_chunk_part& part) const noexcept;
    /// Whether the remaining work of this call would evict a chunk that is decoded for the first time.
    bool would_evict() const noexcept;
    /// The address in the destination to decode a whole chunk to, without a copy; null if there is none.
    std::byte* whole_chunk_destination(std::size_t work, const hdf5_chunk_part& part) const noexcept;
    std::byte* row_at(std::uint64_t position) const noexcept {
        return destination_.data() + position * box_.row_bytes();
    }
    void copy(std::size_t work, const hdf5_chunk_bytes& chunk) const noexcept;

    const hdf5_chunk_reader& reader_;
    const hdf5_row_box& box_;
    std::span<std::byte> destination_;
    std::vector<segment> segments_;   // by bands
    std::vector<std::size_t> bands_;  // where the segments of each band begin
    std::size_t listed_count_ = 0;    // works that run_tasks was given
    std::atomic<std::size_t> next_ = 0;
    std::atomic<std::int64_t> waited_ns_ = 0;
    std::atomic<std::int64_t> busy_ns_ = 0;

    std::mutex mutex_;
    std::condition_variable served_;
    std::size_t promised_ = 0;
    std::vector<std::size_t> again_;
};

}  // namespace pinflow::detail
