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

/// FILE[:NAME] on the command line.
struct source_argument {
    std::string path;                   ///< or all of FILE[:NAME], if FILE is a pattern
    std::optional<std::string> name;    ///< of an array in the file
    std::optional<file_format> format;  ///< nothing for a pattern
    bool is_pattern() const noexcept { return !format; }
};

/// Finds the file that FILE[:NAME] means, and what it is by its content; or the files, if FILE is a pattern.
/// @throws usage_error for shared segments, which this build lacks; what format_of throws.
source_argument find_source(const std::string& text);

/// @throws usage_error if --stack was given for what is no pattern.
void check_stacks(bool stack, const source_argument& source);

/// The names of arrays for a message: all of them, or the first few.
std::string names_of(const std::vector<array_listing>& arrays);

/// Describes the array that `source`, which is no pattern and has a name, means.
/// @throws as list_arrays; invalid_argument if there is no such array; unsupported if it cannot be opened.
array_listing find_array(const source_argument& source);

/// The advice if the shell has expanded a pattern to many files, as the end of a sentence.
inline constexpr std::string_view quote_pattern =
    "quote a pattern of several files ('part-*.npy'), so that pinflow opens them as one array";

/// Opens the array of one argument of `stream`, which may be a pattern. @throws as find_source and open_rows.
std::shared_ptr<const row_source> open_source_rows(const std::string& text, const open_options& options);

}  // namespace pinflow::cli
