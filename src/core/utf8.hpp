#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// UTF-8 as RFC 3629 defines it: no overlong forms, no surrogates, nothing past U+10FFFF.
namespace pinflow::detail {

/// Reads the code point at `position`, which must be within the text, and moves `position` past it.
/// @return nothing if the bytes there are malformed. `position` has then moved by at least one byte.
inline std::optional<std::uint32_t> next_code_point(std::string_view text, std::size_t& position) noexcept {
    const auto byte_at = [&](std::size_t at) { return std::uint32_t{static_cast<unsigned char>(text[at])}; };
    const std::uint32_t lead = byte_at(position++);
    if (lead < 0x80) return lead;
    const unsigned following = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || text.size() - position < following) return std::nullopt;
    std::uint32_t code = lead & (0x3Fu >> following);
    for (unsigned step = 0; step < following; ++step, ++position) {
        if ((byte_at(position) & 0xC0) != 0x80) return std::nullopt;
        code = code << 6 | (byte_at(position) & 0x3F);
    }
    const bool overlong = (following == 2 && code < 0x800) || (following == 3 && code < 0x10000);
    if (overlong || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return std::nullopt;
    return code;
}

/// The number of code points in `text`; empty if it is malformed.
inline std::optional<std::uint64_t> count_code_points(std::string_view text) noexcept {
    std::uint64_t count = 0;
    for (std::size_t position = 0; position < text.size(); ++count) {
        if (!next_code_point(text, position)) return std::nullopt;
    }
    return count;
}

/// Appends a code point, which must not be a surrogate.
inline void append_utf8(std::string& text, std::uint32_t code) {
    const auto append = [&](std::uint32_t byte) { text += static_cast<char>(byte); };
    if (code < 0x80) {
        append(code);
        return;
    }
    const unsigned following = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    append((0xFF00u >> (following + 1) & 0xFFu) | code >> (6 * following));
    for (unsigned step = following; step-- > 0;) {
        append(0x80u | (code >> (6 * step) & 0x3Fu));
    }
}

}  // namespace pinflow::detail
