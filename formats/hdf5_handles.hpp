#pragma once

#include <fmt/format.h>
#include <hdf5.h>
#if __has_include(<H5FDdevelop.h>)  // since 1.14: declarations for file drivers
#include <H5FDdevelop.h>
#endif

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "formats/hdf5_description.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/memory.hpp"

/// Shared by the sources of the layer that calls libhdf5, and private to them. The layer's interfaces are
/// formats/hdf5_library.hpp and formats/hdf5_output.hpp.
namespace pinflow::detail::hdf5 {

// ---- the library -----------------------------------------------------------------------------------------

/// Held during every call of the library: admits one thread at a time, and disables error printing and
/// plugins. The destructor restores both settings.
/// @throws system_failure if there is too little memory to start libhdf5; unsupported if it does not start. A
/// destructor that takes the lock must catch both.
class library_lock {
 public:
    library_lock();
    library_lock(const library_lock&) = delete;
    library_lock& operator=(const library_lock&) = delete;
    ~library_lock();

 private:
    std::unique_lock<std::mutex> lock_;
    ::H5E_auto2_t reporter_ = nullptr;
    void* reporter_data_ = nullptr;
    bool had_reporter_ = false;
    unsigned plugins_ = 0;
    bool had_plugins_ = false;
};

/// The library's report on the failure of the last call: the cause, the function that found it, and whether a
/// file lock caused it.
struct failure_report {
    std::string description;  ///< on one line, not too long, printable; never empty
    std::string function;     ///< the library's function
    bool any = false;
    bool locked = false;
};
failure_report report_failure();

/// Throws format_error with `attempted` and the library's report. Call it right after the call that failed.
[[noreturn]] void fail(std::string_view attempted);

/// Returns the result of a library call; throws if it is negative.
template <typename Result>
Result checked(Result result, std::string_view attempted) {
    if (result < 0) fail(attempted);
    return result;
}

/// Owns an identifier, which `Close` closes.
template <auto Close>
class handle {
 public:
    handle() = default;
    /// @throws format_error if the call that made `id` failed.
    handle(::hid_t id, std::string_view attempted) : id_(checked(id, attempted)) {}
    handle(handle&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
    handle& operator=(handle&& other) noexcept {
        std::swap(id_, other.id_);
        return *this;
    }
    ~handle() {
        if (id_ >= 0) Close(id_);
    }

    ::hid_t id() const noexcept { return id_; }
    /// Hands the identifier over, to be closed by the caller.
    ::hid_t release() noexcept { return std::exchange(id_, -1); }

 private:
    ::hid_t id_ = -1;
};

using file_handle = handle<::H5Fclose>;
using object_handle = handle<::H5Oclose>;  // a group or a dataset
using type_handle = handle<::H5Tclose>;
using space_handle = handle<::H5Sclose>;
using property_handle = handle<::H5Pclose>;
using driver_handle = handle<::H5FDunregister>;

// ---- a file ----------------------------------------------------------------------------------------------

/// The reads of a file's data that the library tried to make.
struct recorded_read {
    unsigned count = 0;  ///< number of reads; the other members describe the last one
    std::uint64_t offset_bytes = 0;
    std::uint64_t size_bytes = 0;
};

/// For its lifetime, reads of data from files opened here are recorded but not made, and their buffers stay
/// unchanged. This finds where libhdf5 stores data, in microseconds, for every version of the library and
/// every kind of chunk index. Only one may exist at a time.
class recording {
 public:
    recording();
    recording(const recording&) = delete;
    recording& operator=(const recording&) = delete;
    ~recording();

    /// The reads since the last call.
    recorded_read take() noexcept;
};

/// A file, opened read-only with our own driver: the library's default driver, which can also record reads.
class open_file {
 public:
    /// `chunk_cache_bytes` bounds the decoded chunks that the library keeps of each dataset.
    /// @throws format_error; system_failure if the file is locked; data_changed if the path names another
    /// file than `file` by now.
    open_file(const input_file& file, std::size_t chunk_cache_bytes);

    ::hid_t id() const noexcept { return file_.id(); }
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    std::uint64_t user_block_bytes() const noexcept { return user_block_bytes_; }

 private:
    void check_same_file(const input_file& file, ::hid_t access) const;

    driver_handle driver_;
    file_handle file_;
    std::uint64_t size_bytes_;
    std::uint64_t user_block_bytes_ = 0;
};

inline constexpr std::size_t default_chunk_cache_bytes = std::size_t{1} << 20;

/// Calls `function`, and puts the path in front of its error messages.
template <typename Function>
auto naming(const input_file& file, Function function) -> decltype(function()) {
    const auto sentence = [&](const error& failure) {
        return fmt::format("cannot open '{}': {}", file.path(), failure.what());
    };
    try {
        return function();
    } catch (const format_error& failure) {
        throw format_error(sentence(failure));
    } catch (const unsupported& failure) {
        throw unsupported(sentence(failure));
    } catch (const invalid_argument& failure) {
        throw invalid_argument(sentence(failure));
    } catch (const system_failure& failure) {
        throw system_failure(sentence(failure), failure.code());
    }
}

// ---- what is in it ---------------------------------------------------------------------------------------

/// Link access properties that follow soft links within the file, but never into other files.
class link_access {
 public:
    link_access();
    link_access(const link_access&) = delete;
    link_access& operator=(const link_access&) = delete;

    ::hid_t id() const noexcept { return properties_.id(); }
    /// The other file that a path led to since the last call; empty if none did.
    std::string take_other_file() { return std::exchange(other_file_, {}); }

 private:
    property_handle properties_;
    std::string other_file_;
};

/// Identifies an object within a file, independent of its name.
struct object_identity {
    ::H5O_type_t type = H5O_TYPE_UNKNOWN;
    std::string token;
    unsigned link_count = 0;  ///< hard links to it
};
/// @return empty if the library fails to identify the object.
std::optional<object_identity> identity_of(::hid_t location, const char* name, const link_access& links);

/// Whether no other path leads to the groups of this one: each has one hard link, and no soft link is
/// followed to it.
bool is_only_path(const open_file& file, const std::string& name, const link_access& links);

/// Opens the dataset at a path.
/// @throws invalid_argument, unsupported, format_error; messages do not name the file.
object_handle open_dataset(const open_file& file, const std::string& name, link_access& links);

// ---- a dataset -------------------------------------------------------------------------------------------

/// The element type of a dataset. Some HDF5 types are arrays.
struct element_type {
    dtype type;
    shape_vector shape;  ///< of the array type; empty for other types
};
/// @throws unsupported and format_error; messages continue after "the dataset 'NAME'".
element_type element_type_of(::hid_t type);

/// How much to describe. `all` locates every chunk, and may find that the storage is `absent` (no chunk was
/// written) or `library` (few of many chunks were written, or some are missing and the fill value differs
/// within an element). `listing` does not: such storage is `chunked`, and `chunks` stays empty, as does
/// `compact_data`.
enum class detail_wanted : bool { listing, all };
/// Describes a dataset; `name` becomes the description's name.
/// @throws unsupported, format_error; messages do not name the file.
hdf5_description describe(const open_file& file, const object_handle& dataset, const std::string& name,
                          detail_wanted wanted);

// ---- its chunks ------------------------------------------------------------------------------------------

/// A buffer for reads that are only recorded: the library gets its address, but never writes to it.
class untouched_memory {
 public:
    void* of(std::uint64_t size_bytes);

 private:
    memory_region memory_;
};

/// Finds the locations of the chunks of a dataset, without reading any of them.
class chunk_finder {
 public:
    /// All arguments must outlive the object; the description must have its shapes and filters.
    /// @throws format_error, as all members; messages continue after "the dataset 'NAME'".
    chunk_finder(const open_file& file, const object_handle& dataset, const hdf5_description& description);

    /// The chunk whose first element is at `position`, along the axes of the dataset itself. No other
    /// `recording` may exist.
    hdf5_chunk find(std::span<const ::hsize_t> position);

 private:
    bool is_missing(std::span<const ::hsize_t> position) const;
    /// Whether the file gives the chunk neither an offset nor a size.
    bool is_unallocated(std::span<const ::hsize_t> position) const;
    bool is_partial(std::span<const ::hsize_t> position) const noexcept;

    const open_file& file_;
    const object_handle& dataset_;
    const hdf5_description& description_;
    bool edges_unfiltered_ = false;
    untouched_memory memory_;
};

}  // namespace pinflow::detail::hdf5
