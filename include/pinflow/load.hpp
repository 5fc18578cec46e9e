#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/empty_on_move.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/stream.hpp"

namespace pinflow {

struct load_options;
struct loaded_tensors;

namespace detail {
struct aliased_job;
struct load_job;
class loaded_block;
struct opened_tensors;
}  // namespace detail

/// A tensor of a file, from metadata alone.
struct tensor_description {
    /// As in the file. The array of a .npy file has the name of the file without its extension.
    std::string name;
    pinflow::dtype dtype;
    shape_vector shape;
    std::size_t file = 0;          ///< index in tensor_files::files
    std::uint64_t size_bytes = 0;  ///< of all elements, uncompressed
    /// Whether the host device maps this tensor if it is loaded alone and whole (see device_tensor). False if
    /// it must be decoded or reordered, is misaligned, or has less than 64 KiB. While tensors have 8192
    /// mappings, only those of 1 MiB and more are mapped.
    bool is_mappable = false;
};

/// The indices begin ... end - 1 of one axis.
struct tensor_slice {
    std::size_t axis = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

/// One tensor to load. A GPU itself swaps the bytes of big-endian elements, and reorders arrays in Fortran
/// order with up to 8 axes longer than 1, if elements have 1, 2, 4, 8 or 16 bytes, and numbers at most 8.
struct tensor_request {
    std::string name;
    /// The part of the tensor to load. Only this part is read. Gaps of less than 3 KiB in it may be read
    /// too, and the kernel may read ahead across gaps of up to 16 KiB. Of a chunked HDF5 dataset, only the
    /// chunks with elements of the part are read. A .npz member that the CPU decodes or reorders is read as a
    /// whole.
    std::optional<tensor_slice> slice = std::nullopt;
    /// The type that the elements are cast to, as `pinflow convert --dtype` does: from booleans, integers and
    /// floats of up to 8 bytes to such types, little-endian. A GPU casts floats to floats itself. The CPU
    /// casts all other types, elements that it decodes, and elements for a misaligned `destination`. Both
    /// give the same bits. Casts to integers truncate toward zero and clamp to the type's range; NaN becomes
    /// 0. Casts to floats round to nearest even; what is too large becomes infinity, or NaN if the type has
    /// no infinity (float8_e4m3fn). Casts to booleans make every value but 0 true. Empty: the type in the
    /// file, little-endian.
    std::optional<pinflow::dtype> dtype = std::nullopt;
    /// Memory of the device for all elements in C order, at any address; used by the load's own stream, so
    /// other work on this memory must have finished. After an error it may be half written. Destinations must
    /// not overlap. Null: the load allocates memory.
    std::byte* destination = nullptr;
    /// Slices along further axes, or along all of them if `slice` is empty; in any order, and at most one for
    /// each axis. The part is then a box.
    std::vector<tensor_slice> further_slices = {};  // NOLINT(readability-redundant-member-init): g++ wants it
};

/// How the bytes of a tensor reach a GPU.
enum class load_route {
    /// With one or two cores `copy`, while tensors that cannot take it are staged. With up to 8 cores or
    /// threads `both` (3 if the files are on tmpfs, and pages of an earlier load are still being unlocked).
    /// Threads that read slices more slowly than whole tensors count as fewer, so `both` is also chosen with
    /// more of them. With more threads `staged`, and also if less than 32 MiB can take the route `copy`, or
    /// if more than a quarter of the sampled pages are not in the page cache.
    automatic,
    /// The pages of the files are page-locked in place, and the copy engine reads them. Only for bytes that
    /// need no decoding and no cast: tensors, or slices along the first axis, of 48 KiB and more, or
    /// neighbours in a file that together are as long. Also for slices of 1 MiB and more along other axes,
    /// which lie in runs with gaps between them: if a run has at least 64 bytes and a third of the gap, or at
    /// least 342 KiB, and runs at equal distances have at least 1 MiB together. Short pieces at boundaries of
    /// registrations are staged.
    copy,
    staged,  ///< CPU threads read the files into page-locked staging buffers
    both,    ///< `copy` from the front of the files, and `staged` from the end, until they meet
};

/// "auto", "copy", "staged", "both".
std::string_view to_string(load_route route) noexcept;

/// Called with the number of bytes done and the total number of bytes.
using load_progress = std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)>;

struct load_options {
    /// Tensors to load: names, or patterns with `*`, `?` and `[...]` as in the shell. Empty: all. Only
    /// load_tensors and tensor_files::select use it; tensor_files::load has requests instead.
    std::vector<std::string> names = {};  // NOLINT(readability-redundant-member-init): g++ wants it
    /// Casts float16, bfloat16, float32 and float64 tensors to this type, as tensor_request::dtype. Other
    /// tensors keep their type. Only load_tensors and tensor_files::select use it.
    std::optional<pinflow::dtype> dtype = std::nullopt;
    load_route route = load_route::automatic;
    /// The most CPU threads that read, decode and cast. 0: one for each core, but on the route `both` one
    /// less, and at most 14. Short loads use at most four threads, plus one for each 4 MiB and each part that
    /// is decoded; large chunks, as many as half of the available memory allows. The calling thread alone
    /// does loads of up to 1 MiB that are staged.
    unsigned threads = 0;
    /// As pin_options::budget_bytes and pin_options::limit. Pages are unlocked by a background thread that
    /// may outlast the call; the process waits for it before it exits.
    std::uint64_t pin_budget_bytes = 0;
    pinflow::pin_limit pin_limit = pinflow::pin_limit::memory;
    /// Where device memory comes from; null: the device's pool. `allocate` is called on the calling thread.
    std::shared_ptr<memory_resource> resource = nullptr;
    /// Called on the calling thread, up to ten times a second, and at the end. `done_bytes` have been sent to
    /// the device, written to memory or mapped. `total_bytes` is the size of all tensors. If it throws, the
    /// load ends with that exception (with system_failure instead of std::bad_alloc).
    load_progress progress = nullptr;
};

/// A tensor in device memory, in C order and little-endian. Copies share the memory, which outlives files,
/// streams and whatever else took part in the load. The last copy frees it, on any thread. Work that uses the
/// memory must have finished by then, or used_on names its streams. Device memory is never freed in a forked
/// process, nor if no event can be recorded in one of these streams: it is being captured into a CUDA graph,
/// the device has failed, or memory is short.
///
/// Tensors of less than 1 MiB share blocks of up to 32 MiB, each at a multiple of 256 bytes. A block is freed
/// with its last tensor.
///
/// On the host device, contiguous tensors that need no decoding and no cast, and are aligned for their type,
/// are private mappings of the file, if at least 64 KiB of the file are loaded without being gathered,
/// decoded or cast (1 MiB while tensors have 8192 mappings). Their pages are those of the page cache until
/// they are written to, which does not change the file. If the file is truncated, reading the lost pages
/// raises SIGBUS; if it is written to, the tensor may change.
///
/// A moved-from tensor has no memory and 0 bytes, and to_dlpack throws invalid_argument for it.
class device_tensor {
 public:
    const std::string& name() const noexcept { return name_; }
    const pinflow::dtype& dtype() const noexcept { return dtype_; }
    const shape_vector& shape() const noexcept { return shape_; }
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    const pinflow::device& device() const noexcept { return device_; }
    /// The first element, in device memory. Null if there are no elements.
    std::byte* data() const noexcept { return data_; }
    /// Whether the elements are a private mapping of the file.
    bool is_mapped() const noexcept;
    /// Names a stream whose work uses the memory. When the last tensor of the block goes, the memory is freed
    /// after all work that is then enqueued on this stream. The stream must live until the last tensor of the
    /// block has gone. No effect on a caller's own memory and on mappings.
    /// @throws invalid_argument for a stream of another device.
    void used_on(stream_view stream) const;
    /// Keeps the memory alive. Empty for a caller's own memory, and if there are no elements.
    std::shared_ptr<const void> share() const;

 private:
    friend class tensor_files;
    device_tensor(std::string name, pinflow::dtype type, shape_vector shape, pinflow::device device)
        : name_(std::move(name)), dtype_(std::move(type)), shape_(std::move(shape)), device_(device) {}

    std::string name_;
    pinflow::dtype dtype_;
    shape_vector shape_;
    detail::empty_on_move<std::uint64_t> size_bytes_ = 0;
    pinflow::device device_;
    detail::empty_on_move<std::byte*> data_ = nullptr;
    std::shared_ptr<detail::loaded_block> block_;
};

/// What a load did.
struct load_report {
    std::uint64_t size_bytes = 0;    ///< of all tensors, as delivered
    std::uint64_t copied_bytes = 0;  ///< by the copy engine from pages that were page-locked in place
    std::uint64_t staged_bytes = 0;  ///< through staging buffers, or read into memory of the host device
    std::uint64_t mapped_bytes = 0;  ///< mapped, on the host device
    unsigned threads = 0;  ///< the most at once that read, decoded and cast, without the calling one
    std::chrono::nanoseconds duration{};  ///< of the whole call
    std::string reason;                   ///< one sentence on how the bytes travelled, and why
};

struct loaded_tensors {
    std::vector<device_tensor> tensors;  ///< in the order of the requests, or of files and data
    load_report report;
    std::unordered_map<std::string, std::size_t> indices;  ///< of `tensors`, by name

    /// The tensor `name`.
    /// @throws invalid_argument if there is no such tensor.
    const device_tensor& operator[](const std::string& name) const;
};

/// The tensors of several files: .safetensors, .npz, .npy and HDF5, opened by their headers alone. Copies
/// share the open files. Members may be called from several threads.
class tensor_files {
 public:
    /// Reads the headers, those of several files in parallel.
    /// @throws invalid_argument for two tensors of one name, and for no files; what list_arrays throws.
    explicit tensor_files(std::vector<std::filesystem::path> files);
    // without move members: a move copies, so that a moved-from object stays usable
    tensor_files(const tensor_files&) noexcept = default;
    tensor_files& operator=(const tensor_files&) noexcept = default;
    ~tensor_files() = default;

    const std::vector<std::filesystem::path>& files() const noexcept;
    /// All tensors that can be loaded, file by file, as list_arrays orders them: by offset in safetensors
    /// files, by directory in .npz files, by name in HDF5 files. Further hard links and soft links of HDF5
    /// datasets follow after the tensors of all files. Those that have the name of another tensor, or of a
    /// link in another file, are left out. Of a group with several links, only the first hard link is
    /// searched.
    const std::vector<tensor_description>& tensors() const noexcept;
    /// The names of the tensors that cannot be loaded, sorted. `tensor` says why.
    std::vector<std::string> refused_names() const;
    /// Checks that every tensor of the files can be loaded.
    /// @throws for the first tensor that cannot: unsupported, or format_error if it is damaged.
    void require_all() const;
    /// The description of the tensor `name`.
    /// @throws invalid_argument if there is no such tensor; unsupported if it cannot be loaded, or
    /// format_error if that is because it is damaged.
    const tensor_description& tensor(std::string_view name) const;
    /// What load_tensors would load: a request for each tensor that load_options::names selects, in the order
    /// of `tensors`, with the cast to load_options::dtype. Other options are not looked at.
    /// @throws invalid_argument for a pattern that selects nothing; unsupported or format_error, as `tensor`,
    /// if a selected tensor cannot be loaded.
    std::vector<tensor_request> select(const load_options& options) const;
    /// The text metadata of the safetensors files. If several have the same key, that of the first.
    const std::map<std::string, std::string>& metadata() const noexcept;

    /// Loads tensors to `device`, and waits until they are complete. On a GPU, the routes `copy` and `both`
    /// page-lock the pages of the files, until shortly after the call, and up to 160 MiB of page-locked
    /// staging buffers are kept for later loads to the device. All tensors are whole, or an error is thrown
    /// and all memory is freed. Tensors that are links to one HDF5 dataset are transferred once, count
    /// once in the report, and share memory, unless they have a destination, different slices or types.
    /// @throws as `tensor` for a name; invalid_argument also for a slice outside its axis, two slices along
    /// one axis, a type that the elements cannot be cast to, a tensor that is requested twice, and
    /// destinations that overlap.
    /// @throws data_changed for a file that has changed since it was opened (a safetensors file may be
    /// replaced, unless such files hold half of the descriptors that input_files may have); format_error for
    /// one whose content is damaged; system_failure; device_error if a GPU is out of memory.
    /// @throws unsupported on a GPU if the route is `copy` and pages cannot be page-locked, or some of the
    /// tensors are not for this route; on a GPU also for elements of more than 4 MiB each that must be
    /// decoded or reordered.
    loaded_tensors load(std::span<const tensor_request> requests, const pinflow::device& device,
                        const load_options& options = {}) const;

 private:
    struct without_descriptions {};
    tensor_files(without_descriptions, std::shared_ptr<const detail::opened_tensors> opened);
    friend loaded_tensors load_tensors(std::span<const std::filesystem::path> files,
                                       const pinflow::device& device, const load_options& options);
    std::vector<std::uint32_t> select_indices(std::span<const std::string> patterns) const;
    loaded_tensors load_jobs(std::vector<detail::load_job> jobs, const pinflow::device& device,
                             const load_options& options) const;
    void insert_aliases(loaded_tensors& loaded, const std::vector<detail::aliased_job>& aliases) const;

    std::shared_ptr<const detail::opened_tensors> opened_;
};

/// Loads all tensors of several files, or those that load_options::names selects.
/// @throws as tensor_files and tensor_files::load; as tensor_files::require_all, or tensor_files::select if
/// there are names.
loaded_tensors load_tensors(std::span<const std::filesystem::path> files, const pinflow::device& device,
                            const load_options& options = {});
inline loaded_tensors load_tensors(const std::filesystem::path& file, const pinflow::device& device,
                                   const load_options& options = {}) {
    return load_tensors(std::span(&file, 1), device, options);
}

/// A tensor to be saved.
struct tensor_to_save {
    std::string name;
    pinflow::dtype dtype;
    shape_vector shape;
    const std::byte* data = nullptr;  ///< all elements in C order, in memory of the stream's device
};

/// Writes a safetensors file, atomically as safetensors_writer. On a GPU, takes 32 MiB of page-locked memory:
/// one piece is copied from the device while another one is written. The tensors are read after the work
/// enqueued on `stream` so far. Returns when the file is complete.
/// `progress` is called with the bytes written, as load_options::progress. If it throws, the save ends with
/// that exception, and a file of that name stays as it was.
/// @throws as safetensors_writer; invalid_argument also for a tensor that has elements, but no `data`;
/// device_error; what `progress` throws.
/// @throws data_changed if memory of the host device is mapped from a file that was truncated. Pieces of less
/// than 1 MiB, also at the end of a large tensor, need the fault guard for that: without it, SIGBUS ends the
/// process.
void save_tensors(const std::filesystem::path& path, std::span<const tensor_to_save> tensors,
                  stream_view stream, const std::map<std::string, std::string>& metadata = {},
                  const load_progress& progress = nullptr);

}  // namespace pinflow
