#pragma once

#include <cstddef>
#include <string>
#include <string_view>

/// Makes text from a file safe for messages.
namespace pinflow::detail {

/// `text` on one line, cut after `max_characters`. A byte that is not printable ASCII becomes `?`.
inline std::string printable(std::string_view text, std::size_t max_characters) {
    std::string result;
    for (const char character : text.substr(0, max_characters)) {
        result += character >= ' ' && character <= '~' ? character : '?';
    }
    if (text.size() > max_characters) result += "...";
    return result;
}

/// `text` in quotes, printable, cut after 60 characters.
inline std::string quote(std::string_view text) {
    return "'" + printable(text, 60) + "'";
}

/// The maximum length of a name in a label: enough to tell arrays in nested groups apart.
inline constexpr std::size_t max_label_name = 200;

/// The label of an array in a file, as the tool takes it: "a.h5:group/data".
inline std::string array_label(const std::string& path, std::string_view name) {
    return path + ":" + printable(name, max_label_name);
}

}  // namespace pinflow::detail
