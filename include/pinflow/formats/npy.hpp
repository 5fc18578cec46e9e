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

/// The contents of a .npy header. The source of the format is numpy's "NPY format" enhancement proposal and
/// numpy.lib.format.
struct npy_header {
    pinflow::dtype dtype;
    bool fortran_order = false;
    shape_vector shape;
    /// The offset of the data: the size of magic, version, length and header text.
    std::uint64_t data_offset_bytes = 0;
};

/// Parses a header: a pure function of the file's first bytes. Checks every length against the file size
/// before it allocates.
/// @param bytes any prefix of the file that holds the whole header.
/// @param file_size_bytes the size of the whole file.
/// @throws format_error (a message without the path) if numpy would not accept the header, if no known writer
/// produces one like it, or if the file is too short for its data.
/// @throws unsupported for pickled objects.
npy_header parse_npy_header(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

/// Formats a header as numpy does: in the oldest version that can hold it, padded so that the data begins at
/// a multiple of `alignment_bytes` (a power of two from 16 to 8192; numpy uses 64). bfloat16 and the 8-bit
/// floats are written as `|V2` and `|V1`, as ml_dtypes does. The header has the same size for every length of
/// the axis that can grow: the first axis, or the last one in Fortran order.
/// @throws invalid_argument for a header that numpy would not read, for big-endian bfloat16, and for another
/// alignment.
std::string format_npy_header(const pinflow::dtype& type, std::span<const std::uint64_t> shape,
                              bool fortran_order = false, std::uint64_t alignment_bytes = 64);

/// Opens a .npy file (versions 1.0 to 3.0): reads the header and maps the data without reading it. The time
/// does not depend on the size.
/// @throws system_failure, format_error, unsupported; data_changed if the file changes meanwhile. Each
/// message names the path.
array open_npy(const std::filesystem::path& path);

/// Writes an array as a .npy file, atomically: writes an unnamed file in the same folder (a temporary file if
/// the filesystem has no unnamed files), then fsync, rename, and fsync of the folder. So a symbolic link at
/// `path` is replaced, and not followed. A Fortran-order view is written in Fortran order, a view in neither
/// order in C order.
/// @throws system_failure if the file cannot be written. An existing file at `path` is then unchanged, unless
/// only the last step failed: the new file is then in place, but may not survive a power failure.
/// @throws invalid_argument for a header that numpy would not read, and for a view that was moved from.
void write_npy(const std::filesystem::path& path, const array_view& view);

/// Writes a .npy file whose elements arrive in pieces, atomically as write_npy. Not thread-safe. A moved-from
/// writer throws invalid_argument.
class npy_writer {
 public:
    /// Begins a C-order file of this type and shape in the folder of `path`.
    /// @throws invalid_argument for a header that numpy would not read, and unless `alignment_bytes` is a
    /// power of two from 16 to 8192.
    /// @throws system_failure if the file cannot be created.
    npy_writer(const std::filesystem::path& path, const pinflow::dtype& type, shape_vector shape,
               std::uint64_t alignment_bytes = 64);
    /// Begins a C-order file of any number of rows of `row_shape`. `finish` writes the number of rows into
    /// the header, as the length of the first axis.
    /// @throws invalid_argument if a row has no bytes, since such rows cannot be counted; as the constructor.
    static npy_writer of_rows(const std::filesystem::path& path, const pinflow::dtype& type,
                              const shape_vector& row_shape, std::uint64_t alignment_bytes = 64);
    npy_writer(npy_writer&&) noexcept;
    npy_writer& operator=(npy_writer&&) noexcept;
    /// Discards the file unless `finish` has put it in place.
    ~npy_writer();

    /// Appends elements; a piece may end within an element.
    /// @throws invalid_argument for more bytes than the shape has; system_failure.
    void write(std::span<const std::byte> bytes);
    /// Makes the file durable and renames it into place. If only the last step fails, fsync of the folder,
    /// the new file is in place but may not survive a power failure.
    /// @throws invalid_argument if bytes of the shape or of the last row are missing; system_failure.
    void finish();

 private:
    struct state;
    state& valid_state() const;

    explicit npy_writer(std::unique_ptr<state> begun) noexcept;
    std::unique_ptr<state> state_;
};

}  // namespace pinflow
