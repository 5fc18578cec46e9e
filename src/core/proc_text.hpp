#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// Reads and parses the text files of /proc and /sys.
namespace pinflow::detail {

/// The whole text of a file; empty if it cannot be read.
std::string read_proc_text(const std::string& path);
/// The first word after `label` at the beginning of a line; empty if there is no such line.
std::string_view word_after(std::string_view text, std::string_view label);
/// Parses digits, which only line ends and blanks may follow. Empty for any other text.
std::optional<std::uint64_t> parse_number(std::string_view text, int base = 10);

}  // namespace pinflow::detail
