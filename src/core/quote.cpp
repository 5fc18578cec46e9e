#include "src/core/quote.hpp"

#include <fmt/format.h>

#include <optional>

#include "src/core/utf8.hpp"

namespace pinflow::detail {

bool is_terminal_control(std::uint32_t code_point) noexcept {
    const auto is_within = [code_point](std::uint32_t first, std::uint32_t last) {
        return code_point >= first && code_point <= last;
    };
    return code_point < 0x20 || is_within(0x7F, 0x9F) || code_point == 0x61C || is_within(0x200E, 0x200F) ||
           is_within(0x2028, 0x202E) || is_within(0x2066, 0x2069);
}

std::string next_escaped(std::string_view text, std::size_t& position) {
    const std::size_t begin = position;
    const std::optional<std::uint32_t> code = next_code_point(text, position);
    if (!code) {
        position = begin + 1;
        return fmt::format("\\x{:02x}", static_cast<unsigned char>(text[begin]));
    }
    if (*code == '\n') return "\\n";
    if (!is_terminal_control(*code)) return std::string(text.substr(begin, position - begin));
    return *code < 0x80 ? fmt::format("\\x{:02x}", *code) : fmt::format("\\u{:04x}", *code);
}

std::string printable(std::string_view text, std::size_t max_characters) {
    std::string result;
    std::size_t position = 0;
    for (std::size_t count = 0; position < text.size(); ++count) {
        if (count == max_characters) return result + "...";
        result += next_escaped(text, position);
    }
    return result;
}

std::string quote(std::string_view text, std::size_t max_characters) {
    return "'" + printable(text, max_characters) + "'";
}

std::string array_label(const std::string& path, std::string_view name) {
    return path + ":" + printable(name, max_label_name);
}

}  // namespace pinflow::detail
