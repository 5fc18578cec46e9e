#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/listing.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow {

enum class file_format { npy, npz, safetensors, hdf5 };

/// "npy", "npz", "safetensors", "hdf5".
std::string_view to_string(file_format format) noexcept;

/// The file is of a format that pinflow knows, but that this build cannot read.
class format_not_built : public unsupported {
 public:
    using unsupported::unsupported;
};

/// Detects the format of a file from its content, not its name. The file may still turn out to be damaged
/// when it is read.
/// @throws format_error for an empty file and for an unknown format; system_failure.
file_format format_of(const std::filesystem::path& path);

/// Lists all arrays of a file; an array that cannot be opened is listed with the reason. A structured .npy
/// file is one array. A .npy file that cannot be opened is an error, since it holds nothing else.
/// @throws as format_of and the format's own list function; format_not_built for an HDF5 file in a build
/// without HDF5, as the functions below that open arrays.
std::vector<array_listing> list_arrays(const std::filesystem::path& path);

/// Opens the only array of a file.
/// @throws invalid_argument if there are none or several (the message names up to 10); what the format's own
/// open function throws.
array open(const std::filesystem::path& path);

/// Opens the array `name` of a file: a member of a .npz file, a tensor, an HDF5 dataset (a path within the
/// file), or a field of a structured .npy file.
/// @throws invalid_argument if there is no such array; what the format's own open function throws.
array open(const std::filesystem::path& path, std::string_view name);

/// FILE[:NAME], as on the tool's command line. The longest existing prefix that ends before a colon is the
/// file.
struct file_and_name {
    std::string path;
    std::string name;  ///< empty if none was given
    bool named = false;
};
/// Splits FILE[:NAME]. If the whole text is an existing path, there is no name. If no prefix exists, the
/// whole text is the path.
file_and_name split_file_and_name(const std::string& text);

/// Whether open_rows treats `text` as a pattern: it contains `*`, `?` or `[`, and does not name a file.
bool is_pattern(const std::string& text);

struct open_options {
    /// Upper bound, in bytes, on the memory for decoding rows: the chunks of HDF5 datasets. All files that
    /// match a pattern share it (see hdf5_options::memory_bytes).
    std::uint64_t memory_bytes = std::uint64_t{512} << 20;
    /// If true, each file that matches a pattern is one row, as with pinflow::stack; otherwise the rows of
    /// all files are concatenated. If true, the files may also hold arrays without axes or in Fortran order.
    /// Has no effect on FILE without a pattern.
    bool stack = false;
};

/// Opens the array that FILE[:NAME] names, as one row source. If FILE is a pattern (`*`, `?`, `[...]` as in
/// the shell, and no file has that name), all matching files are concatenated or stacked, in the order of
/// their paths. Numbers in paths are compared by value: "part-2" comes before "part-10".
///
/// Matching .npy files are opened in parallel, files of other formats one after the other. The result is
/// mapped as `concatenate` says. If several files cannot be opened, the error is that of the first in that
/// order.
/// @throws as open; invalid_argument if nothing matches, or if types or row shapes differ.
std::shared_ptr<const row_source> open_rows(const std::string& text, const open_options& options = {});

}  // namespace pinflow
