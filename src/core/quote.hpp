#pragma once

#include <string>
#include <string_view>

/// Text from a file, made safe for a sentence.
namespace pinflow::detail {

/// `text` between quotes, on one line and not too long: what is not printable ASCII becomes `?`.
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
