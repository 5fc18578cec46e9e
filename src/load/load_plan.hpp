#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "formats/element_streams.hpp"
#include "formats/safetensors_tensor.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/load.hpp"
#include "pinflow/mapped_file.hpp"
#include "pinflow/memory.hpp"
#include "src/load/byte_runs.hpp"

/// From opened files and requests to the pieces of work that a load consists of.
namespace pinflow::detail {

/// A tensor of an opened file. Small and without memory of its own, as files may have many: each 4 KiB of
/// new memory costs a page fault.
struct stored_tensor {
    std::string_view name;
    std::span<const std::uint64_t> shape;
    const pinflow::dtype* dtype = nullptr;  ///< as in the file, but little-endian
    std::uint64_t size_bytes = 0;           ///< of all elements, uncompressed
    /// Where all elements lie in the file, one after the other. Empty if they must be decoded.
    std::optional<std::uint64_t> offset_bytes;
    std::uint32_t file = 0;            ///< index in opened_tensors
    std::uint8_t swap_size_bytes = 1;  ///< bytes of each number to swap; 1: little-endian
    bool has_no_name = false;          ///< in the file, which is a .npy file
    bool is_fortran_order = false;     ///< with two or more axes longer than 1, and not compressed
    /// Parts along axis 0 that begin at multiples of this index can be decoded independently. 0: only the
    /// whole tensor can be decoded.
    std::uint64_t part_rows = 0;
    /// Of a chunked dataset; empty for other tensors.
    // NOLINTNEXTLINE(readability-redundant-member-init): clang wants it
    std::span<const std::uint64_t> chunk_shape = {};
    /// If this is an alias: the index in opened_tensors of the tensor under its first name.
    std::optional<std::uint32_t> alias_of = std::nullopt;

    /// Whether the file has the elements in C order and little-endian.
    bool is_as_delivered() const { return offset_bytes && swap_size_bytes == 1 && !is_fortran_order; }
};

/// The decoded bytes of a chunk; 0 if the tensor is not chunked.
std::uint64_t chunk_bytes_of(const stored_tensor& tensor) noexcept;
/// Whether elements of `type` at this offset in a file are aligned in its mapping.
bool is_aligned(const pinflow::dtype& type, std::uint64_t offset_bytes) noexcept;
/// Whether the whole tensor, loaded alone to the host device, is mapped unless there are many mappings.
bool is_mappable(const stored_tensor& tensor) noexcept;

/// The maximum number of characters of a path in a message.
inline constexpr std::size_t max_shown_path = 1000;

/// Why a tensor of a file cannot be loaded.
struct refusal {
    std::size_t file = 0;
    std::string reason;
};

/// What tensor_files holds.
struct opened_tensors {
    std::vector<std::filesystem::path> paths;  ///< as they were given, for messages
    /// To open the files again. As they were given if the process has no working directory.
    std::vector<std::filesystem::path> absolute_paths;
    std::vector<std::shared_ptr<const input_file>> files;  ///< for each path
    std::vector<stored_tensor> stored;
    std::vector<tensor_memory> memory;                 ///< of `stored`, for safetensors files
    std::deque<array_listing> listings;                ///< of `stored`, for other files
    std::deque<std::string> aliases;                   ///< names of aliases in `stored`
    std::unordered_map<std::string, refusal> refused;  ///< tensors that cannot be loaded, by name
    std::string first_refused;                         ///< the name of the first one
    std::map<std::string, std::string> metadata;

    /// `stored` for the user, of tensor_files only: load_tensors needs none.
    std::vector<tensor_description> descriptions;

    /// The indices of `stored` by name, made by the first call: a load of all tensors of one safetensors file
    /// needs none. Thread-safe.
    const std::unordered_map<std::string_view, std::size_t>& by_name() const;
    /// The first byte of a file, which the first call maps as a whole, until the files are closed. Null if it
    /// cannot be mapped, or if loaded tensors have many mappings. Thread-safe.
    const std::byte* pages_of(std::size_t file) const;
    /// A file whose tensors must be decoded. It is opened by its path when it is first asked for.
    /// Thread-safe.
    const element_file& elements_of(std::size_t file) const;

 private:
    mutable std::once_flag by_name_made_;
    mutable std::unordered_map<std::string_view, std::size_t> by_name_;
    mutable std::mutex pages_mutex_;
    mutable std::map<std::size_t, std::shared_ptr<const mapped_file>> pages_;  ///< null: cannot be mapped
    mutable std::mutex decoded_files_mutex_;
    struct decoded_file {
        std::once_flag opened;
        std::unique_ptr<element_file> elements;
    };
    mutable std::map<std::size_t, decoded_file> decoded_files_;
};

struct file_position {
    std::size_t file = 0;
    std::uint64_t offset_bytes = 0;
};

/// The memory that one or several tensors share.
class loaded_block {
 public:
    explicit loaded_block(device_buffer memory) : memory_(std::move(memory)), process_(::getpid()) {}
    /// A mapping of the host device.
    explicit loaded_block(std::shared_ptr<const memory_region> mapping)
        : mapping_(std::move(mapping)), process_(::getpid()) {}
    loaded_block(const loaded_block&) = delete;
    loaded_block& operator=(const loaded_block&) = delete;
    /// Frees the memory once the streams of use_on have passed their work so far. Device memory is leaked in
    /// a forked process, and if no event can be recorded in one of the streams: it is being captured, the
    /// device has failed, or memory is short.
    ~loaded_block();

    bool is_mapped() const noexcept { return mapping_ != nullptr; }
    /// All of the memory. If it is a mapping: the whole mapped range of the file, with the other tensors in
    /// it.
    std::span<std::byte> bytes() const noexcept {
        return mapping_ ? mapping_->bytes() : std::span(memory_.data(), memory_.size_bytes());
    }
    /// Adds a stream that uses the memory: see the destructor. Thread-safe.
    void use_on(stream_view stream);
    /// Frees the memory in the order of `stream`, on which the load must not enqueue anything.
    void set_stream(stream_view stream) {
        if (!is_mapped()) memory_.set_stream(stream);
    }

 private:
    device_buffer memory_;
    std::shared_ptr<const memory_region> mapping_;
    ::pid_t process_;
    std::mutex mutex_;
    std::vector<stream_view> streams_;
    std::vector<event> events_;  ///< one for each stream, so that the destructor only records them
};

/// What a request selects of a tensor. What it points to must outlive the load.
struct tensor_part {
    const tensor_slice* slice = nullptr;
    std::span<const tensor_slice> further = {};  // NOLINT(readability-redundant-member-init): g++ wants it

    std::size_t slice_count() const { return further.size() + (slice == nullptr ? 0 : 1); }
    bool is_whole() const { return slice_count() == 0; }
    const tensor_slice& operator[](std::size_t index) const {
        if (slice == nullptr) return further[index];
        return index == 0 ? *slice : further[index - 1];
    }
};

/// One tensor of a load. Offsets count bytes in the order of the staging buffers: the order of the file if
/// the device converts the elements, otherwise C order. Small, as a load may have many: the memory of new
/// jobs costs a page fault for each 4 KiB.
struct load_job {
    std::uint32_t tensor = 0;              ///< index in opened_tensors
    std::uint32_t block = 0;               ///< where it is delivered
    std::uint64_t block_offset_bytes = 0;  ///< in `block`
    const pinflow::dtype* cast = nullptr;  ///< the type as delivered, if it is not the stored one
    // NOLINTNEXTLINE(readability-redundant-member-init): g++ wants it
    tensor_part part = {};
    std::uint64_t size_bytes = 0;         ///< as delivered
    std::uint64_t first_bytes = 0;        ///< of the part, in the stored elements
    std::byte* destination = nullptr;     ///< the caller's
    bool has_gaps = false;                ///< the part is not contiguous in the stored elements: see runs_of
    bool is_decoded = false;              ///< by an element stream, in C order
    bool is_converted_by_device = false;  ///< staged as stored: see device_conversions.hpp

    bool is_cast() const { return cast != nullptr; }
    /// Whether the bytes are delivered as they are stored, in one piece.
    bool is_contiguous() const { return !has_gaps && !is_cast() && !is_decoded && !is_converted_by_device; }
};

/// The type of a job's elements in the file, but little-endian.
inline const dtype& stored_type_of(const opened_tensors& opened, const load_job& job) {
    return *opened.stored[job.tensor].dtype;
}
/// The type as delivered.
inline const dtype& type_of(const opened_tensors& opened, const load_job& job) {
    return job.is_cast() ? *job.cast : stored_type_of(opened, job);
}
/// Bytes of a part of a job in a staging buffer, given its bytes as delivered.
inline std::uint64_t staged_bytes_of(const opened_tensors& opened, const load_job& job,
                                     std::uint64_t size_bytes) {
    if (!job.is_converted_by_device || !job.is_cast()) return size_bytes;
    return size_bytes / job.cast->size_bytes() * stored_type_of(opened, job).size_bytes();
}
/// The shape as delivered.
inline shape_vector shape_of(const opened_tensors& opened, const load_job& job) {
    const std::span<const std::uint64_t> stored = opened.stored[job.tensor].shape;
    shape_vector shape(stored.begin(), stored.end());
    for (std::size_t i = 0; i < job.part.slice_count(); ++i)
        shape[job.part[i].axis] = job.part[i].end - job.part[i].begin;
    return shape;
}

/// The slice of a job along an axis; null if the job delivers all indices.
inline const tensor_slice* slice_along(const load_job& job, std::size_t axis) {
    for (std::size_t i = 0; i < job.part.slice_count(); ++i) {
        if (job.part[i].axis == axis) return &job.part[i];
    }
    return nullptr;
}
/// The indices of an axis that a job delivers.
inline axis_range range_of(const opened_tensors& opened, const load_job& job, std::size_t axis) {
    if (const tensor_slice* const slice = slice_along(job, axis)) return {slice->begin, slice->end};
    return {0, opened.stored[job.tensor].shape[axis]};
}

/// Where the elements of a job lie in its tensor, in the order of the staging buffers.
byte_runs runs_of(const opened_tensors& opened, const load_job& job);

/// A part of a tensor within a unit.
struct load_piece {
    std::uint32_t job = 0;
    std::uint32_t unit_offset_bytes = 0;  ///< in the staging buffer
    std::uint64_t begin_bytes = 0;        ///< as delivered
    std::uint64_t size_bytes = 0;
};

/// Work of one thread: pieces that fit into a staging buffer together, or one piece that is decoded.
struct load_unit {
    std::size_t first_piece = 0;
    std::size_t piece_count = 0;
    bool is_decoded = false;
    bool is_box = false;      ///< of a chunked dataset: see chunk_boxes.hpp
    bool reads_gaps = false;  ///< one piece of whole runs, which is read with the gaps between them
};

struct load_block {
    std::uint64_t size_bytes = 0;
    std::byte* destination = nullptr;  ///< the caller's memory; null if the load allocates it
    /// Where the block's one tensor begins in its file, if it is a mapping of the file (host device only).
    std::optional<file_position> mapped = std::nullopt;
};

struct load_plan {
    std::vector<load_job> jobs;  ///< in the order of the requests
    std::vector<load_block> blocks;
    std::vector<load_piece> pieces;
    /// Units whose bytes the copy engine can read in the file's pages, in the order of files and offsets.
    std::vector<load_unit> copyable;
    std::vector<load_unit> others;
    /// The bytes of a file that are mapped on the host device: from begin to end.
    struct mapped_range {
        std::uint64_t begin_bytes = 0;
        std::uint64_t end_bytes = 0;
    };
    std::vector<mapped_range> mapped;  ///< for each file
    std::uint64_t total_bytes = 0;
    std::uint64_t mapped_bytes = 0;
    std::size_t decoded_count = 0;      ///< of units that are decoded: the first ones of `others`
    std::uint64_t decoded_bytes = 0;    ///< of all chunks, or whole tensors, that are decoded
    std::uint64_t max_chunk_bytes = 0;  ///< the largest chunk of a dataset to decode
    std::size_t fortran_count = 0;      ///< of jobs of tensors in Fortran order that are decoded as a whole

    std::span<const load_piece> pieces_of(const load_unit& unit) const {
        return std::span(pieces).subspan(unit.first_piece, unit.piece_count);
    }
};

/// The size of a staging buffer, and of the largest piece that is not decoded.
inline constexpr std::uint64_t load_unit_bytes = std::uint64_t{4} << 20;
/// In a block, tensors begin at multiples of this number of bytes.
inline constexpr std::uint64_t block_alignment = 256;
/// The maximum size of a block that small tensors share. Each block costs an allocation.
inline constexpr std::uint64_t shared_block_bytes = std::uint64_t{32} << 20;
/// Smaller tensors share blocks.
inline constexpr std::uint64_t min_own_block_bytes = std::uint64_t{1} << 20;

/// A request of a tensor that has been found. What it points to must outlive the load.
struct found_request {
    std::uint32_t tensor = 0;  ///< index in opened_tensors
    tensor_part part = {};     // NOLINT(readability-redundant-member-init): g++ wants it
    const pinflow::dtype* dtype = nullptr;
    std::byte* destination = nullptr;
};

/// How messages name a tensor.
std::string label_of(const opened_tensors& opened, std::size_t index);
/// How messages name the files: the path of a single one, otherwise their number.
std::string name_of_files(std::span<const std::filesystem::path> paths);

/// Throws the error of opening a tensor that cannot be loaded: format_error if it is damaged, unsupported if
/// pinflow lacks its type.
[[noreturn]] void refuse(const opened_tensors& opened, const std::string& name);

/// @throws invalid_argument for a name that no tensor has; as `refuse` for a tensor that cannot be loaded.
found_request find_request(const opened_tensors& opened, const tensor_request& request);

/// The job of a request.
/// @throws invalid_argument for a slice outside its axis, and a type that the elements cannot be cast to.
load_job job_of(const opened_tensors& opened, const found_request& request, const pinflow::device& device);

/// A requested alias, whose dataset another job delivers with the same slice and type.
struct aliased_job {
    std::size_t position = 0;  ///< among all tensors of the load
    std::uint32_t tensor = 0;  ///< index in opened_tensors
    std::size_t job = 0;       ///< index among the jobs that are left
};
/// Removes the jobs of aliases that another job covers.
/// @return the removed ones, sorted by position.
std::vector<aliased_job> remove_aliases(const opened_tensors& opened, std::vector<load_job>& jobs);

/// The jobs of requests.
/// @throws as job_of; invalid_argument also for a tensor that is requested twice, and for destinations that
/// overlap.
std::vector<load_job> jobs_of(const opened_tensors& opened, std::span<const found_request> requests,
                              const pinflow::device& device);

/// @param jobs in the order of the requests, each of another tensor.
/// @throws unsupported; see tensor_files::load.
load_plan plan_load(const opened_tensors& opened, std::vector<load_job> jobs, const pinflow::device& device);

/// The file of a job, and the offset of its first byte there. Of a decoded job, the offset is
/// approximate.
inline file_position position_of(const opened_tensors& opened, const load_job& job) {
    const stored_tensor& stored = opened.stored[job.tensor];
    return {stored.file, stored.offset_bytes.value_or(0) + job.first_bytes};
}

/// A piece that is not cast or decoded, in its file: from the first byte to the last one, with the gaps
/// between its runs.
struct stored_span {
    file_position begin;
    std::uint64_t size_bytes = 0;
};
stored_span span_of(const opened_tensors& opened, const load_job& job, const load_piece& piece);

/// Calls take(stored, begin_bytes) with the bytes of each run of a piece, and where they begin in the job as
/// delivered.
template <typename Take>
void for_each_run(const opened_tensors& opened, const load_job& job, load_piece piece, Take take) {
    const std::uint64_t run_bytes = job.has_gaps ? runs_of(opened, job).size_bytes : job.size_bytes;
    for (std::uint64_t left = piece.size_bytes; left != 0; left -= piece.size_bytes) {
        piece.size_bytes = std::min(run_bytes - piece.begin_bytes % run_bytes, left);
        take(span_of(opened, job, piece), piece.begin_bytes);
        piece.begin_bytes += piece.size_bytes;
    }
}

/// Count the mappings of loaded tensors. While there are many, plan_load maps large parts of files only.
/// Thread-safe.
void count_mapping() noexcept;
void uncount_mapping() noexcept;
bool has_many_mappings() noexcept;

}  // namespace pinflow::detail
