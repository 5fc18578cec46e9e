#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "pinflow/array.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/formats/safetensors.hpp"

namespace pinflow::cli {

/// OUT[:NAME] of `convert`.
struct target_argument {
    std::string path;
    std::string name;  ///< "data" unless one is given
    bool named = false;
    file_format format;
};

/// Splits OUT[:NAME] and chooses the format by the file's extension; the file need not exist.
/// @throws usage_error for an unknown extension, a format that this build cannot write, an empty NAME, and a
/// NAME in a .npy file.
target_argument parse_target(const std::string& text);

/// One array of a file that is to be written: C order, little-endian.
struct target_array {
    std::string name;
    pinflow::dtype dtype;
    shape_vector shape;
};

using text_map = std::map<std::string, std::string>;

/// How the arrays are stored in the file.
struct target_layout {
    /// Each array's data begins at a multiple of this; in safetensors only the first tensor's. Unused with
    /// deflate_level > 0.
    std::uint64_t alignment_bytes = 4096;
    unsigned deflate_level = 0;  ///< HDF5: 1 to 9 for deflated chunks, 0 for contiguous data
};

/// @throws usage_error unless arrays of `format` can begin at multiples of `alignment_bytes`.
void check_alignment(file_format format, std::uint64_t alignment_bytes);

/// A file of one of the formats, which appears under its name complete or not at all.
class target_file {
 public:
    /// Begins the file; `arrays` is one array for .npy, `metadata` is for safetensors. For HDF5 and
    /// safetensors, checks all arrays; for .npz, `begin` checks each.
    /// @throws system_failure if the filesystem reports too little free space; what the writer of the format
    /// throws.
    target_file(const target_argument& target, std::span<const target_array> arrays, const text_map& metadata,
                const target_layout& layout);

    /// Begins the next of the arrays.
    void begin(const target_array& array);
    void write(std::span<const std::byte> bytes);
    void finish();

 private:
    std::variant<npy_writer, npz_writer, safetensors_writer, hdf5_writer> writer_;
    target_layout layout_;
};

}  // namespace pinflow::cli
