#include "src/core/proc_text.hpp"

#include <array>
#include <charconv>
#include <cstddef>
#include <fstream>
#include <system_error>

namespace pinflow::detail {

std::string read_proc_text(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string text;
    std::array<char, 4096> part{};
    while (file.read(part.data(), part.size()), file.gcount() > 0)
        text.append(part.data(), static_cast<std::size_t>(file.gcount()));
    return text;
}

std::string_view word_after(std::string_view text, std::string_view label) {
    for (std::size_t at = text.find(label); at != std::string_view::npos; at = text.find(label, at + 1)) {
        if (at != 0 && text[at - 1] != '\n') continue;
        const std::size_t begin = text.find_first_not_of(" \t", at + label.size());
        if (begin == std::string_view::npos) return {};
        return text.substr(begin, text.find_first_of(" \t\n", begin) - begin);
    }
    return {};
}

std::optional<std::uint64_t> parse_number(std::string_view text, int base) {
    while (!text.empty() && (text.back() == '\n' || text.back() == ' '))
        text.remove_suffix(1);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (error != std::errc() || end != text.data() + text.size() || text.empty()) return {};
    return value;
}

}  // namespace pinflow::detail
