#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"

namespace pinflow {

/// What the header of a .npy file says. The source of the format is numpy's "NPY format" enhancement proposal
/// and numpy.lib.format.
struct npy_header {
    pinflow::dtype dtype;
    bool fortran_order = false;
    shape_vector shape;
    /// Where the data begins: the size of magic, version, length and header text.
    std::uint64_t data_offset_bytes = 0;
};

/// Parses a header, a pure function of the file's first bytes. `bytes` may be any prefix of the file that
/// holds the whole header, and may continue past it; `file_size_bytes` is the size of the whole file, against
/// which every length is checked before anything is allocated.
/// @throws format_error (a message without the path) when the bytes are not a header that numpy would
/// accept, and unsupported for pickled objects.
npy_header parse_npy_header(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

/// The header's bytes, as numpy writes them: the oldest version that can hold it, padded so that the data
/// begins at a multiple of `alignment_bytes` (a power of two from 16 to 8192; 64 is numpy's own). bfloat16
/// and the 8-bit floats are written as `|V2` and `|V1`, as ml_dtypes does. Its size is the same for every
/// length of the axis that can grow: the first one, or the last one in Fortran order.
/// @throws invalid_argument for what numpy would not read, and for big-endian bfloat16.
std::string format_npy_header(const pinflow::dtype& type, std::span<const std::uint64_t> shape,
                              bool fortran_order = false, std::uint64_t alignment_bytes = 64);

/// Opens a .npy file (versions 1.0 to 3.0): reads the header and maps the data, which is not touched, so that
/// this takes the same time for any size.
/// @throws system_failure, format_error, unsupported; each message names the path.
array open_npy(const std::filesystem::path& path);

/// Writes an array as a .npy file, atomically: to an unnamed file in the same folder (a
/// temporary one if the filesystem has no unnamed files), fsync, rename, fsync of the folder.
/// A Fortran-order view is written in Fortran order, a view without either order in C order.
/// @throws system_failure when the file cannot be written; what was at `path` is then still there.
void write_npy(const std::filesystem::path& path, const array_view& view);

/// Writes a .npy file whose elements arrive in pieces, atomically as write_npy. Not thread-safe. One that was
/// moved from throws invalid_argument.
class npy_writer {
 public:
    /// Begins a C-order file of that type and shape beside `path`.
    npy_writer(const std::filesystem::path& path, const pinflow::dtype& type, shape_vector shape,
               std::uint64_t alignment_bytes = 64);
    /// Begins a C-order file of rows that are counted as they arrive, each of `row_shape`: `finish` writes
    /// their number into the header, as the length of the first axis.
    /// @throws invalid_argument when a row has no bytes, so that nothing could be counted.
    static npy_writer of_rows(const std::filesystem::path& path, const pinflow::dtype& type,
                              const shape_vector& row_shape, std::uint64_t alignment_bytes = 64);
    npy_writer(npy_writer&&) noexcept;
    npy_writer& operator=(npy_writer&&) noexcept;
    /// Without `finish`, what was written is thrown away.
    ~npy_writer();

    /// Appends elements; pieces may be cut anywhere. @throws invalid_argument past the size that the shape
    /// promises.
    void write(std::span<const std::byte> bytes);
    /// Makes the file durable under its name. @throws invalid_argument when bytes are missing, of the shape
    /// or of the last row; system_failure.
    void finish();

 private:
    struct state;
    state& valid_state() const;

    explicit npy_writer(std::unique_ptr<state> begun) noexcept;
    std::unique_ptr<state> state_;
};

}  // namespace pinflow
