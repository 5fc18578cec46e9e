#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/strided_reader.hpp"
#include "src/load/load_plan.hpp"

namespace pinflow::detail {

/// A descriptor of a file for one thread, with an open file description of its own: reads of 4 KiB by 16
/// threads through a shared one are limited by contention for its reference count.
class thread_descriptor {
 public:
    explicit thread_descriptor(const input_file& file);
    thread_descriptor(const thread_descriptor&) = delete;
    thread_descriptor& operator=(const thread_descriptor&) = delete;
    ~thread_descriptor();

    int get() const noexcept { return own_ >= 0 ? own_ : shared_.get(); }

 private:
    descriptor_lease shared_;
    int own_ = -1;  ///< -1: /proc is not mounted, or there are too many descriptors
};

/// Reads elements of jobs as they are delivered: sliced, and cast unless the device converts them. For one
/// thread.
class tensor_reader {
 public:
    /// @param copies_short_runs whether short runs of slices are copied from the file's pages, if they are in
    /// the page cache and the fault guard is installed. They are read otherwise.
    tensor_reader(const opened_tensors& opened, const load_plan& plan, bool copies_short_runs = false)
        : opened_(opened), plan_(plan), copies_short_runs_(copies_short_runs) {}
    tensor_reader(const tensor_reader&) = delete;
    tensor_reader& operator=(const tensor_reader&) = delete;
    ~tensor_reader();

    /// Fills `destination` with the bytes of a job from `begin_bytes` on. The job must not be decoded. If the
    /// job is cast, `begin_bytes` and the size of `destination` must be multiples of an element.
    /// @throws data_changed, system_failure.
    void read(const load_job& job, std::uint64_t begin_bytes, std::span<std::byte> destination);
    /// Fills a staging buffer with the pieces of a unit. Pieces that the device converts are left as stored.
    /// Neighbours in the file and in the buffer are read at once.
    /// @throws as `read`.
    void read(const load_unit& unit, std::byte* buffer);

    /// Reads bytes of a file as they are stored.
    /// @throws data_changed, system_failure.
    void read_range(std::size_t file, std::uint64_t offset_bytes, std::span<std::byte> destination);

    /// Decodes a job from its beginning to its end, unless `stopped` becomes true. Calls
    /// next_buffer(size_bytes) for memory of `piece_bytes` at most, or of one element if that is larger,
    /// fills it, and calls take(begin_bytes, filled) with it.
    /// @throws format_error, data_changed, system_failure.
    template <typename NextBuffer, typename Take>
    void decode(const load_job& job, std::uint64_t piece_bytes, const std::atomic<bool>& stopped,
                NextBuffer next_buffer, Take take) {
        try {
            decode_pieces(job, piece_bytes, stopped, next_buffer, take);
        } catch (const format_error&) {
            opened_.files[opened_.stored[job.tensor].file]->check_unchanged();  // changes look like damage
            throw;
        }
    }

 private:
    template <typename NextBuffer, typename Take>
    void decode_pieces(const load_job& job, std::uint64_t piece_bytes, const std::atomic<bool>& stopped,
                       NextBuffer next_buffer, Take take) {
        stopped_ = &stopped;
        begin_decoding(job);
        const std::uint64_t element_bytes = type_of(opened_, job).size_bytes();
        const std::uint64_t whole_bytes =
            std::max(piece_bytes / element_bytes * element_bytes, element_bytes);
        for (std::uint64_t begin = 0; begin < job.size_bytes; begin += whole_bytes) {
            if (stopped) return;
            const std::uint64_t size_bytes = std::min(whole_bytes, job.size_bytes - begin);
            std::byte* const buffer = next_buffer(size_bytes);
            decode_next(job, {buffer, size_bytes});
            if (stopped) return;
            take(begin, std::span<const std::byte>(buffer, size_bytes));
        }
        finish_decoding(job);
    }

    void read_stored(const load_job& job, std::uint64_t begin_bytes, std::span<std::byte> destination);
    bool copy_runs(const load_job& job, const byte_runs& runs, std::uint64_t begin_bytes,
                   std::span<std::byte> destination);
    void read_runs(const load_job& job, std::uint64_t begin_bytes, std::span<std::byte> destination);
    const thread_descriptor& descriptor_of(std::size_t file);
    void begin_decoding(const load_job& job);
    void decode_next(const load_job& job, std::span<std::byte> destination);
    void decode_stored(const load_job& job, std::span<std::byte> destination);
    void skip(std::uint64_t size_bytes);
    void finish_decoding(const load_job& job);

    const opened_tensors& opened_;
    const load_plan& plan_;
    bool copies_short_runs_;
    scratch_memory cast_scratch_;
    scratch_memory read_scratch_;
    std::map<std::size_t, thread_descriptor> descriptors_;  ///< of one file
    std::optional<std::size_t> last_file_;                  ///< that read_range has read
    unsigned reads_ = 0;                                    ///< of it, one after the other
    std::map<std::size_t, std::unique_ptr<element_file>> decoded_files_;
    // of the job that is being decoded
    std::unique_ptr<element_stream> stream_;
    bool delivers_job_alone_ = true;  ///< whether the stream delivers no other elements than the job's
    // for a stream that delivers others, too
    std::uint64_t position_bytes_ = 0;  ///< in the stored elements
    std::uint64_t done_bytes_ = 0;      ///< of the stored elements of the slice
    const std::atomic<bool>* stopped_ = nullptr;
};

}  // namespace pinflow::detail
