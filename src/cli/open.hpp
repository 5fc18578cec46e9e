#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pinflow/formats/listing.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::cli {

/// FILE[:NAME] on the command line.
struct source_argument {
    std::string path;
    std::optional<std::string> name;  ///< of an array in the file
    file_format format;
};

/// Finds the file that FILE[:NAME] means, and what it is by its content.
/// @throws usage_error for shared segments, which this build lacks; what format_of throws.
source_argument find_source(const std::string& text);

/// The names of arrays, for a sentence: all of them, or the first few.
std::string names_of(const std::vector<array_listing>& arrays);

/// Opens what one argument of `stream` means, which may be a pattern. @throws as find_source and open_rows.
std::shared_ptr<const row_source> open_source_rows(const std::string& text, const open_options& options);

}  // namespace pinflow::cli
