#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// What /proc and /sys say, which are texts that Linux makes when they are read.
namespace pinflow::detail {

/// All of a file; empty when it cannot be read.
std::string read_proc_text(const std::string& path);
/// The first word after `label` at the beginning of a line; empty when there is no such line.
std::string_view word_after(std::string_view text, std::string_view label);
/// Digits alone, but for line ends and blanks behind them; empty when it is not that.
std::optional<std::uint64_t> parse_number(std::string_view text, int base = 10);

}  // namespace pinflow::detail
