#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// Makes text from a file safe for messages.
namespace pinflow::detail {

/// Whether a terminal obeys the character instead of showing it: control characters (C0, DEL and C1),
/// separators of lines, and characters that change the direction of text.
bool is_terminal_control(std::uint32_t code_point) noexcept;

/// Returns the character at `position`, escaped if it is unsafe on a terminal, and moves `position` past it.
/// Control characters become `\n`, `\xNN` or `\uNNNN`, and a byte that is not UTF-8 `\xNN`. Backslashes are
/// not escaped.
std::string next_escaped(std::string_view text, std::size_t& position);

/// `text` on one line, for people: its characters as next_escaped returns them. Longer texts are cut after
/// `max_characters` characters and end in "...".
std::string printable(std::string_view text, std::size_t max_characters);

/// `text` in quotes, printable, cut after `max_characters`.
std::string quote(std::string_view text, std::size_t max_characters = 60);

/// The maximum length of a name in a label, in characters: enough to tell arrays in nested groups apart.
inline constexpr std::size_t max_label_name = 200;

/// The label of an array in a file, as the tool takes it ("a.h5:group/data"), but with a printable name that
/// is cut after `max_label_name` characters.
std::string array_label(const std::string& path, std::string_view name);

}  // namespace pinflow::detail
