#include "formats/safetensors_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "pinflow/error.hpp"

namespace pinflow::detail {

// ---- the inside of a string -------------------------------------------------------------------------------

bool json_string_check::take(unsigned char byte) noexcept {
    if (escape_ == escape::letter) return take_escape_letter(byte);
    if (escape_ == escape::digits) return take_digit(byte);
    if (continuation_count_ > 0) {
        const bool fits = byte >= min_continuation_ && byte <= max_continuation_;
        min_continuation_ = 0x80;
        max_continuation_ = 0xBF;
        --continuation_count_;
        return fits;
    }
    if (byte == '\\') {
        escape_ = escape::letter;
        return true;
    }
    return !needs_low_surrogate_ && take_lead(byte);
}

bool json_string_check::take_escape_letter(unsigned char byte) noexcept {
    if (byte == 'u') {
        escape_ = escape::digits;
        digit_count_ = 4;
        code_ = 0;
        return true;
    }
    escape_ = escape::none;
    constexpr std::string_view letters = "\"\\/bfnrt";
    return !needs_low_surrogate_ && letters.find(static_cast<char>(byte)) != letters.npos;
}

bool json_string_check::take_digit(unsigned char byte) noexcept {
    const unsigned lower = byte | 0x20U;
    if (byte >= '0' && byte <= '9') {
        code_ = code_ << 4 | (byte - unsigned{'0'});
    } else if (lower >= 'a' && lower <= 'f') {
        code_ = code_ << 4 | (lower - unsigned{'a'} + 10);
    } else {
        return false;
    }
    if (--digit_count_ > 0) return true;
    escape_ = escape::none;
    const bool is_low = code_ >= 0xDC00 && code_ < 0xE000;
    if (std::exchange(needs_low_surrogate_, code_ >= 0xD800 && code_ < 0xDC00)) {
        needs_low_surrogate_ = false;
        return is_low;
    }
    return !is_low;
}

bool json_string_check::take_lead(unsigned char byte) noexcept {
    if (byte < 0x80) return byte >= 0x20;
    if (byte < 0xC2 || byte > 0xF4) return false;
    continuation_count_ = byte >= 0xF0 ? 3 : byte >= 0xE0 ? 2 : 1;
    // neither overlong forms nor surrogates, and nothing past U+10FFFF
    if (byte == 0xE0) min_continuation_ = 0xA0;
    if (byte == 0xED) max_continuation_ = 0x9F;
    if (byte == 0xF0) min_continuation_ = 0x90;
    if (byte == 0xF4) max_continuation_ = 0x8F;
    return true;
}

// ---- the text ---------------------------------------------------------------------------------------------

namespace {

bool is_space(unsigned char byte) noexcept {
    return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r';
}

unsigned char byte_of(std::byte byte) noexcept {
    return std::to_integer<unsigned char>(byte);
}

}  // namespace

safetensors_text::safetensors_text(piece_source next_piece, long_strings strings)
    : source_(std::move(next_piece)), strings_(strings) {}

void safetensors_text::refuse(std::uint64_t index) const {
    throw format_error(fmt::format("its header is not valid JSON at byte {}", index + 1));
}

bool safetensors_text::next_piece() {
    rest_ = source_();
    const auto zero = std::ranges::find(rest_, std::byte{0});
    if (zero != rest_.end()) refuse(taken_bytes_ + static_cast<std::uint64_t>(zero - rest_.begin()));
    return !rest_.empty();
}

safetensors_text::int_type safetensors_text::underflow() {
    for (;;) {
        if (rest_.empty() && !next_piece()) return traits_type::eof();
        skip();
        const std::size_t count = count_shown();
        if (count == 0) continue;
        // the buffer is only read: nothing puts characters back
        char* const shown = const_cast<char*>(reinterpret_cast<const char*>(rest_.data()));
        setg(shown, shown, shown + count);
        rest_ = rest_.subspan(count);
        taken_bytes_ += count;
        return traits_type::to_int_type(*shown);
    }
}

/// Skips the bytes that the parser does not see.
void safetensors_text::skip() {
    if (skips_string_) return skip_string();
    std::size_t count = 0;
    while (after_space_ && count < rest_.size() && is_space(byte_of(rest_[count])))
        ++count;
    rest_ = rest_.subspan(count);
    taken_bytes_ += count;
    skipped_bytes_ += count;
}

void safetensors_text::skip_string() {
    std::size_t count = 0;
    for (; count < rest_.size(); ++count) {
        const unsigned char byte = byte_of(rest_[count]);
        if (byte == '"' && !is_escaped_) break;
        is_escaped_ = byte == '\\' && !is_escaped_;
        if (!check_.take(byte)) refuse(taken_bytes_ + count);
    }
    if (count < rest_.size() && !check_.may_end()) refuse(taken_bytes_ + count);
    skips_string_ = count == rest_.size();
    rest_ = rest_.subspan(count);
    taken_bytes_ += count;
    skipped_bytes_ += count;
}

/// The number of bytes in rest_ before the next skipped byte.
std::size_t safetensors_text::count_shown() {
    std::size_t count = 0;
    while (count < rest_.size()) {
        const unsigned char byte = byte_of(rest_[count]);
        if (!in_string_) {
            if (after_space_ && is_space(byte)) break;
            take_outside(byte);
            ++count;
            continue;
        }
        ++count;
        if (!consume_in_string(byte)) continue;
        skips_string_ = true;
        break;
    }
    return count;
}

void safetensors_text::take_outside(unsigned char byte) noexcept {
    after_space_ = is_space(byte);
    if (after_space_) return;
    if (byte == '"') {
        in_string_ = true;
        is_value_ = after_colon_ && strings_ == long_strings::cut;
        string_bytes_ = 0;
        check_ = {};
    }
    after_colon_ = byte == ':';
}

/// @return whether the rest of the string is skipped.
bool safetensors_text::consume_in_string(unsigned char byte) noexcept {
    if (byte == '"' && !is_escaped_) {
        in_string_ = false;
        return false;
    }
    is_escaped_ = byte == '\\' && !is_escaped_;
    // the parser sees the invalid byte and reports it
    if (is_value_) is_value_ = check_.take(byte);
    ++string_bytes_;
    return is_value_ && string_bytes_ >= max_shown_string_bytes && check_.may_end();
}

}  // namespace pinflow::detail
