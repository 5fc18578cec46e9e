#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <streambuf>

namespace pinflow::detail {

/// Checks the inside of a JSON string byte by byte: escapes (RFC 8259), surrogate pairs and UTF-8 (RFC 3629).
class json_string_check {
 public:
    /// @return whether the text is still valid with this byte, which does not end the string.
    bool take(unsigned char byte) noexcept;
    /// Whether the string may end here: not within an escape, a surrogate pair or a UTF-8 sequence.
    bool may_end() const noexcept {
        return escape_ == escape::none && continuation_count_ == 0 && !needs_low_surrogate_;
    }

 private:
    enum class escape : std::uint8_t { none, letter, digits };

    bool take_escape_letter(unsigned char byte) noexcept;
    bool take_digit(unsigned char byte) noexcept;
    bool take_lead(unsigned char byte) noexcept;

    escape escape_ = escape::none;
    unsigned digit_count_ = 0;  ///< still to come
    std::uint32_t code_ = 0;
    bool needs_low_surrogate_ = false;
    unsigned continuation_count_ = 0;  ///< still to come
    unsigned min_continuation_ = 0x80;
    unsigned max_continuation_ = 0xBF;
};

/// How string values of a header are passed to the JSON parser.
enum class long_strings : std::uint8_t {
    whole,
    cut,  ///< only the first `max_shown_string_bytes` or slightly more; the rest is checked here
};
inline constexpr std::uint64_t max_shown_string_bytes = 4096;

/// Streams the JSON of a safetensors header to the parser. One piece of it is in memory at a time. The parser
/// copies each token several times, with the spaces before it. So runs of white space are reduced to their
/// first character, and long strings that are the value of a key are cut if `long_strings::cut` is set. Other
/// strings are passed whole.
class safetensors_text final : public std::streambuf {
 public:
    /// Returns the next piece of the text, which stays valid until the next call. Returns an empty piece at
    /// the end.
    using piece_source = std::function<std::span<const std::byte>()>;

    safetensors_text(piece_source next_piece, long_strings strings);

    /// Bytes skipped in the text before the parser's position.
    std::uint64_t skipped_bytes() const noexcept { return skipped_bytes_; }

 protected:
    /// @throws format_error (a sentence without the path) for a zero byte, which the parser would take for
    /// the end of the text, and for an error in the skipped part of a string; what the source throws.
    int_type underflow() override;

 private:
    bool next_piece();
    void skip();
    void skip_string();
    std::size_t count_shown();
    bool consume_in_string(unsigned char byte) noexcept;
    void take_outside(unsigned char byte) noexcept;
    [[noreturn]] void refuse(std::uint64_t index) const;

    piece_source source_;
    long_strings strings_;
    std::span<const std::byte> rest_;  ///< of the piece, not yet passed to the parser
    std::uint64_t taken_bytes_ = 0;    ///< of the text, before rest_
    std::uint64_t skipped_bytes_ = 0;
    bool in_string_ = false;
    bool is_escaped_ = false;  ///< the next character of the string
    bool is_value_ = false;    ///< the string follows a colon, may be cut, and is valid so far
    bool skips_string_ = false;
    std::uint64_t string_bytes_ = 0;  ///< of the string, passed to the parser
    json_string_check check_;         ///< of the string, if it is a value
    bool after_colon_ = false;
    bool after_space_ = false;
};

}  // namespace pinflow::detail
