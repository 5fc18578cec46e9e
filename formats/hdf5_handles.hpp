#pragma once

#include <fmt/format.h>
#include <hdf5.h>
#if __has_include(<H5FDdevelop.h>)  // since 1.14, what writers of drivers need
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

/// What the parts of the one layer that calls libhdf5 share. None of it outside: formats/hdf5_library.hpp.
namespace pinflow::detail::hdf5 {

// ---- the library -----------------------------------------------------------------------------------------

/// Held during every call of the library: one thread at a time, nothing printed, no plugins. Afterwards
/// errors are reported, and plugins loaded, as they were before.
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

/// What the library says of the failure of the last call: its cause, where it found that, and whether a lock
/// is in the way.
struct failure_report {
    std::string description;  ///< on one line, not too long, printable; never empty
    std::string function;     ///< of the library
    bool any = false;
    bool locked = false;
};
failure_report report_failure();

/// Throws format_error: what was tried, and the library's words. Right after the call that failed.
[[noreturn]] void fail(std::string_view attempted);

/// Passes on what a call of the library returned, unless it is negative.
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
    /// @throws format_error when the call that made it failed.
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

/// What the library would have read of a file's data.
struct recorded_read {
    unsigned count = 0;  ///< reads; the rest is of the last one
    std::uint64_t offset_bytes = 0;
    std::uint64_t size_bytes = 0;
};

/// While it lives, reads of data from the files opened here are recorded, not made, and buffers stay as
/// they were. This finds where libhdf5 stores data, in microseconds, for every version of the library and
/// every kind of chunk index. One at a time.
class recording {
 public:
    recording();
    recording(const recording&) = delete;
    recording& operator=(const recording&) = delete;
    ~recording();

    /// What was read since the last call.
    recorded_read take() noexcept;
};

/// A file, open read-only through a driver of our own, which is the library's usual one and can record.
class open_file {
 public:
    /// `chunk_cache_bytes` bounds the decoded chunks that the library keeps of each dataset.
    /// @throws format_error, system_failure when a lock is in the way, data_changed when the path leads to
    /// another file than `file` by now.
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

inline constexpr std::size_t usual_chunk_cache_bytes = std::size_t{1} << 20;

/// Calls `function`, and begins the sentence of an error with the path.
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

/// Paths within the file are followed by soft links, never into other files.
class link_access {
 public:
    link_access();
    link_access(const link_access&) = delete;
    link_access& operator=(const link_access&) = delete;

    ::hid_t id() const noexcept { return properties_.id(); }
    /// The other file that a path led to since the last call; empty when none did.
    std::string take_other_file() { return std::exchange(other_file_, {}); }

 private:
    property_handle properties_;
    std::string other_file_;
};

/// Tells an object of a file from all others of it, whatever it is called.
struct object_identity {
    ::H5O_type_t type = H5O_TYPE_UNKNOWN;
    std::string token;
};
/// @return empty when the library fails to say.
std::optional<object_identity> identity_of(::hid_t place, const char* name, const link_access& links);

/// The dataset that a path leads to. @throws invalid_argument, unsupported, format_error, without the file's
/// path.
object_handle open_dataset(const open_file& file, const std::string& name, link_access& links);

// ---- a dataset -------------------------------------------------------------------------------------------

/// One element of a dataset, as pinflow sees it: some of HDF5's types are arrays.
struct element_type {
    dtype type;
    shape_vector shape;  ///< the axes of the array; empty for one
};
/// @throws unsupported and format_error: what is to be read after "the dataset 'NAME'".
element_type element_type_of(::hid_t type);

/// What a dataset is, or all but where its chunks lie, for listing it: then storage may be chunked without
/// chunks, and is not yet `library` for want of room for them.
enum class detail_wanted : bool { listing, all };
/// `description.name` is `name`. @throws unsupported, format_error, without the file's path.
hdf5_description describe(const open_file& file, const object_handle& dataset, const std::string& name,
                          detail_wanted wanted);

// ---- its chunks ------------------------------------------------------------------------------------------

/// Memory that the library could write to, though it is never touched: a driver that records reads nothing.
class untouched_memory {
 public:
    void* of(std::uint64_t size_bytes);

 private:
    memory_region memory_;
};

/// Finds out where the chunks of a dataset lie, without reading any of them.
class chunk_finder {
 public:
    /// All of these outlive it; of the description it needs shapes and filters.
    /// @throws format_error, to be read after "the dataset 'NAME'", as all of it.
    chunk_finder(const open_file& file, const object_handle& dataset, const hdf5_description& description);

    /// The chunk whose first element is `position`, along the axes of the dataset itself. Nothing is recorded
    /// meanwhile.
    hdf5_chunk find(std::span<const ::hsize_t> position);

 private:
    bool is_missing(std::span<const ::hsize_t> position) const;
    /// Whether the file gives the chunk neither an offset nor a size.
    bool has_no_place(std::span<const ::hsize_t> position) const;
    bool is_partial(std::span<const ::hsize_t> position) const noexcept;

    const open_file& file_;
    const object_handle& dataset_;
    const hdf5_description& description_;
    bool edges_unfiltered_ = false;
    untouched_memory memory_;
};

}  // namespace pinflow::detail::hdf5
