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
#include "src/load/chunk_boxes.hpp"
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
    /// @param is_on_host whether elements go to memory of the host device. Short runs of slices are then
    /// copied from the file's pages, if they are in the page cache and the fault guard is installed. For a
    /// GPU, only those of parts of at most 1 MiB are.
    tensor_reader(const opened_tensors& opened, const load_plan& plan, bool is_on_host = false)
        : opened_(opened), plan_(plan), is_on_host_(is_on_host) {}
    tensor_reader(const tensor_reader&) = delete;
    tensor_reader& operator=(const tensor_reader&) = delete;

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

    /// Decodes a piece: a job, or whole rows of it, unless `stopped` becomes true. Calls
    /// next_buffer(size_bytes) for memory of `buffer_bytes` at most, or of one element if that is larger,
    /// fills it, and calls take(begin_bytes, filled) with it, counted from the beginning of the piece.
    /// @throws format_error, data_changed, system_failure.
    template <typename NextBuffer, typename Take>
    void decode(const load_piece& piece, std::uint64_t buffer_bytes, const std::atomic<bool>& stopped,
                NextBuffer next_buffer, Take take) {
        with_change_check(plan_.jobs[piece.job],
                          [&] { decode_buffers(piece, buffer_bytes, stopped, next_buffer, take); });
    }

    /// Decodes a box of a chunked dataset to `destination`, in C order.
    /// @throws as `decode`.
    void decode_box(const load_piece& piece, const std::atomic<bool>& stopped,
                    std::span<std::byte> destination);
    /// Decodes a box and scatters it to host memory.
    /// @param memory the first byte of the job
    /// @throws as `decode`.
    void decode_box_on_host(const load_piece& piece, const std::atomic<bool>& stopped, std::byte* memory);

 private:
    /// Calls `decode`. If it throws an error and the file has changed, throws data_changed instead.
    template <typename Decode>
    void with_change_check(const load_job& job, Decode decode) {
        try {
            decode();
        } catch (const data_changed&) {
            throw;
        } catch (const error&) {
            opened_.files[opened_.stored[job.tensor].file]->check_unchanged();
            throw;
        }
    }

    template <typename NextBuffer, typename Take>
    void decode_buffers(const load_piece& piece, std::uint64_t buffer_bytes, const std::atomic<bool>& stopped,
                        NextBuffer next_buffer, Take take) {
        stopped_ = &stopped;
        const load_job& job = plan_.jobs[piece.job];
        begin_decoding(piece);
        const std::uint64_t element_bytes = type_of(opened_, job).size_bytes();
        const std::uint64_t whole_bytes =
            std::max(buffer_bytes / element_bytes * element_bytes, element_bytes);
        for (std::uint64_t begin = 0; begin < piece.size_bytes; begin += whole_bytes) {
            if (stopped) return;
            const std::uint64_t size_bytes = std::min(whole_bytes, piece.size_bytes - begin);
            std::byte* const buffer = next_buffer(size_bytes);
            decode_next(job, {buffer, size_bytes});
            if (stopped) return;
            take(begin, std::span<const std::byte>(buffer, size_bytes));
        }
        finish_decoding(piece);
    }

    void read_stored(const load_job& job, std::uint64_t begin_bytes, std::span<std::byte> destination);
    bool copy_runs(const load_job& job, const byte_runs& runs, std::uint64_t begin_bytes,
                   std::span<std::byte> destination);
    void read_runs(const load_job& job, std::uint64_t begin_bytes, std::span<std::byte> destination);
    const thread_descriptor& descriptor_of(std::size_t file);
    [[noreturn]] void refuse_other_layout(const load_job& job) const;
    void begin_decoding(const load_piece& piece);
    std::uint64_t memory_for(const load_job& job) const;
    void open_stream(const load_job& job);
    void read_box(const load_job& job, const element_box& box, std::span<std::byte> destination);
    void decode_next(const load_job& job, std::span<std::byte> destination);
    void decode_stored(const load_job& job, std::span<std::byte> destination);
    void skip(std::uint64_t size_bytes);
    void finish_decoding(const load_piece& piece);

    const opened_tensors& opened_;
    const load_plan& plan_;
    bool is_on_host_;
    scratch_memory cast_scratch_;
    scratch_memory read_scratch_;
    scratch_memory box_scratch_;
    std::map<std::size_t, thread_descriptor> descriptors_;  ///< of one file
    std::optional<std::size_t> last_file_;                  ///< that read_range has read
    unsigned reads_ = 0;                                    ///< of it, one after the other
    // of the piece that is decoded, or that was the last one
    std::unique_ptr<element_stream> stream_;
    const load_job* stream_job_ = nullptr;
    bool reads_whole_tensor_ = true;   ///< whether the stream delivers all elements of the tensor
    bool delivers_only_piece_ = true;  ///< whether it delivers no other elements than the piece's
    // for a stream that delivers others, too
    std::uint64_t position_bytes_ = 0;  ///< in the stored elements
    std::uint64_t done_bytes_ = 0;      ///< of the stored elements of the slice
    const std::atomic<bool>* stopped_ = nullptr;
};

}  // namespace pinflow::detail
