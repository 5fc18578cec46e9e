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

/// Making HDF5 files: the part of the layer that calls libhdf5 which writes.
namespace pinflow::detail::hdf5 {

/// The type that elements have in a file; element_type_of makes the same of it again.
/// @throws unsupported: what is to be read after "the dataset 'NAME'". The library is locked.
type_handle file_type_of(const dtype& type);

/// A file that libhdf5 makes out of nothing, and that appears under its name complete or not at all. The
/// library writes through a driver of ours, to an output_file: so system calls are made, and worded when they
/// fail, in one place, and the file can have permissions by which its name could not be opened again.
///
/// The library itself never learns that a system call failed, as it leaves files half-closed then, and is
/// known to crash over those when the process ends: what failed is kept, nothing is written any more, and it
/// is thrown as soon as the library has returned. After that, nothing can be written or committed.
///
/// Locks the library in each call. Not thread-safe.
class output {
 public:
    /// @throws system_failure.
    explicit output(const std::filesystem::path& path);
    output(const output&) = delete;
    output& operator=(const output&) = delete;
    /// Without `commit`, what was written is thrown away.
    ~output();

    /// The path as it was given, for messages.
    const std::string& path() const noexcept;

    /// Makes a dataset, and the groups that its path leads through. Its elements, which take `size_bytes`,
    /// are to be written in C order, with write_at, from the offset on that is returned, a multiple of
    /// `alignment_bytes`; 0 when there are none.
    /// @throws system_failure, unsupported (what libhdf5 refuses); sentences name the path.
    std::uint64_t create_contiguous(const std::string& name, const dtype& type, const shape_vector& shape,
                                    std::uint64_t size_bytes, std::uint64_t alignment_bytes);
    /// The same of a dataset in chunks, shuffled and deflated, whose chunks are to be written with
    /// write_chunk, until the next dataset is made.
    void create_chunked(const std::string& name, const dtype& type, const shape_vector& shape,
                        const shape_vector& chunk_shape, unsigned deflate_level);

    /// @throws system_failure.
    void write_at(std::uint64_t offset_bytes, std::span<const std::byte> bytes);
    /// Writes one chunk as it is to be stored; bit i of `filter_mask`: filter i was skipped.
    /// @throws as create_chunked.
    void write_chunk(std::span<const std::uint64_t> first_element, std::uint32_t filter_mask,
                     std::span<const std::byte> stored);
    /// Makes the file durable and gives it its name; the last call. @throws system_failure, unsupported.
    void commit();

 private:
    struct state;
    friend struct driver;

    /// Calls `step` with the library locked, and gives what comes of a failure its sentence.
    template <typename Step>
    auto attempt(Step step) -> decltype(step());
    void discard() noexcept;
    object_handle create(const std::string& name, const dtype& type, const shape_vector& shape,
                         const property_handle& creation);

    std::shared_ptr<state> state_;  ///< shared with the library, should it not let go of the file
    driver_handle driver_;
    file_handle file_;
    object_handle chunked_;  ///< the dataset that chunks are written to
};

}  // namespace pinflow::detail::hdf5
