#pragma once

#include <string>
#include <string_view>

/// Makes text from a file safe for messages.
namespace pinflow::detail {

/// `text` in quotes, on one line, cut after 60 characters. A byte that is not printable ASCII becomes `?`.
inline std::string quote(std::string_view text) {
    constexpr std::size_t longest = 60;
    std::string result = "'";
    for (const char character : text.substr(0, longest)) {
        result += character >= ' ' && character <= '~' ? character : '?';
    }
    result += text.size() > longest ? "...'" : "'";
    return result;
}

}  // namespace pinflow::detail
