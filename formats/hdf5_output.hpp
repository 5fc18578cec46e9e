#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "formats/hdf5_handles.hpp"
#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"

/// Writes HDF5 files: the writing part of the layer that calls libhdf5.
namespace pinflow::detail::hdf5 {

/// The type of elements in a file; element_type_of is the inverse. The caller must hold the library lock.
/// @throws unsupported, or format_error if a call of the library fails; messages continue after "the dataset
/// 'NAME'".
type_handle file_type_of(const dtype& type);

/// A new file that libhdf5 writes, and that appears under its name complete or not at all. The library writes
/// with our own driver to an output_file. So all system calls and their error messages are in one place, and
/// the file may have permissions with which its path could not be reopened.
///
/// The library is never told that a system call failed: it would leave the file half-closed, and may crash on
/// it when the process ends. Instead, the driver stores the error and writes nothing more. The error is
/// thrown as soon as the library has returned. After that, nothing can be written or committed.
///
/// Locks the library during its calls. Not thread-safe.
class output {
 public:
    /// @throws system_failure; unsupported if libhdf5 cannot begin the file.
    explicit output(const std::filesystem::path& path);
    output(const output&) = delete;
    output& operator=(const output&) = delete;
    /// Discards the file unless `commit` has returned.
    ~output();

    /// The path as it was given, for messages.
    const std::string& path() const noexcept;

    /// Creates a dataset, and the groups in its path. The caller then writes its `size_bytes` of elements in
    /// C order with write_at, from the returned offset on.
    /// @return a multiple of `alignment_bytes`, or 0 if there are no elements.
    /// @throws system_failure, unsupported (libhdf5 refuses the dataset); messages name the path.
    std::uint64_t create_contiguous(const std::string& name, const dtype& type, const shape_vector& shape,
                                    std::uint64_t size_bytes, std::uint64_t alignment_bytes);
    /// The same for a dataset of shuffled and deflated chunks. The caller writes its chunks with write_chunk
    /// before it creates the next dataset.
    /// @throws as create_contiguous.
    void create_chunked(const std::string& name, const dtype& type, const shape_vector& shape,
                        const shape_vector& chunk_shape, unsigned deflate_level);

    /// @throws system_failure.
    void write_at(std::uint64_t offset_bytes, std::span<const std::byte> bytes);
    /// Writes the stored bytes of one chunk. Bit i of `filter_mask` is set if filter i was skipped.
    /// @throws as create_chunked.
    void write_chunk(std::span<const std::uint64_t> first_element, std::uint32_t filter_mask,
                     std::span<const std::byte> stored);
    /// Makes the file durable and gives it its name; the last call. @throws system_failure, unsupported.
    void commit();

 private:
    struct state;
    friend struct driver;

    /// Calls `step` with the library locked, and completes the message if it fails.
    template <typename Step>
    auto attempt(Step step) -> decltype(step());
    void discard() noexcept;
    object_handle create(const std::string& name, const dtype& type, const shape_vector& shape,
                         const property_handle& creation);

    std::shared_ptr<state> state_;  ///< shared with the library, in case it never closes the file
    driver_handle driver_;
    file_handle file_;
    object_handle chunked_;  ///< the dataset whose chunks are written
};

}  // namespace pinflow::detail::hdf5
