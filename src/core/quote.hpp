#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// Makes text from a file safe for messages.
namespace pinflow::detail {

/// Whether a terminal obeys the character instead of showing it: control characters (C0, DEL and C1),
/// separators of lines, and those that change the direction of text.
bool is_terminal_control(std::uint32_t code_point) noexcept;

/// The character at `position`, which moves past it, as a terminal may be shown it: a control character
/// becomes `\n`, `\x1b` or `\u202e`, a byte that is not UTF-8 becomes `\xff`.
std::string next_escaped(std::string_view text, std::size_t& position);

/// `text` on one line, for people: backslashes in it are not escaped. Otherwise escaped as by next_escaped,
/// cut after `max_characters` of its characters.
std::string printable(std::string_view text, std::size_t max_characters);

/// `text` in quotes, printable, cut after `max_characters`.
std::string quote(std::string_view text, std::size_t max_characters = 60);

/// The maximum length of a name in a label: enough to tell arrays in nested groups apart.
inline constexpr std::size_t max_label_name = 200;

/// The label of an array in a file, as the tool takes it: "a.h5:group/data".
std::string array_label(const std::string& path, std::string_view name);

}  // namespace pinflow::detail
