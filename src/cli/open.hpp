#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/formats/listing.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::cli {

/// The prefix by which a FILE argument names a segment.
inline constexpr std::string_view segment_prefix = "shm:";

/// Whether the path names a descriptor of this process, as /dev/stdin does. Another process finds another
/// file there, and none can be made beside it.
constexpr bool names_descriptor(std::string_view path) noexcept {
    return path == "/dev/stdin" || path.starts_with("/dev/fd/") || path.starts_with("/proc/");
}

/// FILE[:NAME] or shm:NAME on the command line.
struct source_argument {
    std::string path;                   ///< of the file; all of FILE[:NAME] if FILE is a pattern
    std::optional<std::string> name;    ///< of an array in the file
    std::optional<file_format> format;  ///< nothing for a pattern
    std::optional<dtype> type;          ///< of a segment, whose .npy header may not be able to say it
    bool is_pattern() const noexcept { return !format; }
};

/// Splits FILE[:NAME] and detects the file's format. A pattern is returned unsplit, without looking for the
/// files that match.
/// `shm:NAME` becomes the path of the segment.
/// @throws invalid_argument for an empty path; what find_segment, open_segment and format_of throw.
source_argument find_source(const std::string& text);

/// @throws usage_error if --stack was given, but `source` is not a pattern.
void check_stacks(bool stack, const source_argument& source);

/// The names of arrays for a message: all of them, or the first few.
std::string names_of(const std::vector<array_listing>& arrays);

/// Describes the array that `source` names. `source` is not a pattern and has a name.
/// @throws as list_arrays; invalid_argument if there is no such array; unsupported if it cannot be opened.
array_listing find_array(const source_argument& source);

/// The arrays of shm:NAME, if that is a group of segments; empty for any other text.
std::vector<array_listing> list_group(const std::string& text);

/// Whether the array is in Fortran order and its rows are not contiguous. They are contiguous if it has no
/// elements, or at most one axis longer than 1.
bool has_scattered_rows(const array_listing& listed);

/// The advice if the shell has expanded a pattern to many files, as the end of a sentence.
inline constexpr std::string_view quote_pattern =
    "quote a pattern of several files ('part-*.npy'), so that pinflow opens them as one array";

/// Opens the array of a FILE on the command line, which may be a pattern or `shm:NAME`.
/// @throws what open_segment and open_rows throw.
std::shared_ptr<const row_source> open_source_rows(const std::string& text, const open_options& options);

}  // namespace pinflow::cli
