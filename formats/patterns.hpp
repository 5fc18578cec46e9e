#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/formats/open.hpp"

namespace pinflow::detail {

/// Whether the text contains a wildcard of the shell.
bool has_wildcards(std::string_view text);

/// Whether there is a file or folder at `path`. False if that cannot be found out.
bool exists(const std::string& path);

/// The paths that match, in natural order (numbers compare by value). Empty if `pattern` has no wildcards.
/// @throws system_failure if a folder cannot be read.
std::vector<std::string> matches_of(const std::string& pattern);

/// What FILE[:NAME] stands for if FILE is a pattern.
struct matched_files {
    std::vector<std::string> paths;   ///< empty if no file matches
    std::optional<std::string> name;  ///< NAME, if there is one
};

/// The files that FILE[:NAME] stands for if FILE is a pattern; see is_pattern.
/// @throws as matches_of.
matched_files files_of_pattern(const std::string& text);

/// Whether a file at `path` belongs to the files that FILE[:NAME] stands for, or would if it existed. As
/// in `matches_of`, wildcards do not match a leading dot.
bool pattern_covers(const std::string& text, const std::string& path);

/// Calls `use` for each way to split `text` into FILE and NAME, from the longest FILE to the shortest, until
/// it returns true.
template <typename Use>
void try_cuts(const std::string& text, Use use) {
    if (use(file_and_name{text, {}, false})) return;
    for (std::size_t colon = text.rfind(':'); colon != text.npos && colon > 0;
         colon = text.rfind(':', colon - 1)) {
        if (use(file_and_name{text.substr(0, colon), text.substr(colon + 1), true})) return;
    }
}

}  // namespace pinflow::detail
