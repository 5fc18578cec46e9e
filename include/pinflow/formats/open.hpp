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

/// The file is of a format that pinflow knows and this build of it cannot read.
class format_not_built : public unsupported {
 public:
    using unsupported::unsupported;
};

/// What a file is by its content, whatever it is called. It may still turn out to be damaged when it is read.
/// @throws system_failure; format_error for an empty file and for what no reader knows.
file_format format_of(const std::filesystem::path& path);

/// All arrays of a file, also those that cannot be opened, with the reason. A structured .npy file is one
/// array, and a .npy file that cannot be opened is an error, as nothing else is in it.
/// @throws as format_of and the format's own list function; format_not_built, as all functions here.
std::vector<array_listing> list_arrays(const std::filesystem::path& path);

/// Opens the one array of a file. @throws invalid_argument, naming them, when there are several; as the
/// format's own open function.
array open(const std::filesystem::path& path);

/// Opens the array `name` of a file: a member of a .npz file, a tensor, a field of a structured .npy file.
array open(const std::filesystem::path& path, std::string_view name);

/// FILE[:NAME], as the tool takes it: the longest existing prefix that ends at a colon is the file.
struct file_and_name {
    std::string path;
    std::string name;  ///< empty when none was given
    bool named = false;
};
/// Splits FILE[:NAME]. A text that is a path itself has no name; when nothing exists, all of it is the path.
file_and_name split_file_and_name(const std::string& text);

/// Whether open_rows treats `text` as a pattern: it has `*`, `?` or `[` in it, and does not name a file.
bool is_pattern(const std::string& text);

struct open_options {
    /// Upper bound on the memory for rows that are decoded as they are read: the chunks of HDF5 datasets, of
    /// all files that match a pattern together (see hdf5_options::memory_bytes).
    std::uint64_t memory_bytes = std::uint64_t{512} << 20;
    /// Makes each file that matches a pattern one row, as `stack` does, instead of having its rows follow
    /// those of the file before. A row may then also be an array without axes, or in Fortran order. FILE
    /// without a pattern is opened as ever.
    bool stack = false;
};

/// Opens the array that FILE[:NAME] names, as one row source. If FILE is a pattern (`*`, `?`, `[...]` as in
/// the shell, and no file has that name), all matching files are concatenated or stacked, in the order of
/// their paths. Numbers in paths are compared by value: "part-2" comes before "part-10".
///
/// Matching files are opened in parallel and mapped as `concatenate` says. If several cannot be opened, the
/// first in that order is reported.
/// @throws as open; invalid_argument when nothing matches, or types or row shapes differ.
std::shared_ptr<const row_source> open_rows(const std::string& text, const open_options& options = {});

}  // namespace pinflow
