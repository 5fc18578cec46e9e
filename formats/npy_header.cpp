#include "formats/npy_header.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"

// Accepted is every header that a released numpy writes, and from other writers what numpy accepts of: any
// order of keys, either quote, spaces, tabs and line ends between tokens, Python 2's `2L`, no trailing comma,
// any padding. Nothing that numpy rejects is accepted; of the oddities that it accepts, those that nobody
// writes are refused (the table is in tests/npy_header_test.cpp).

namespace pinflow {

namespace {

constexpr std::string_view magic = "\x93NUMPY";
/// numpy's own limit, in characters; a character of UTF-8 takes up to 4 bytes.
constexpr std::uint64_t most_header_characters = 10'000;
/// As many as numpy 2 allows; numpy 1 allows 32.
constexpr std::size_t most_axes = 64;
/// numpy keeps lengths and sizes in a signed 64-bit integer.
constexpr std::uint64_t largest_size = std::numeric_limits<std::int64_t>::max();

template <typename... Arguments>
[[noreturn]] void fail(fmt::format_string<Arguments...> sentence, Arguments&&... arguments) {
    throw format_error(fmt::format(sentence, std::forward<Arguments>(arguments)...));
}

// ---- magic, version, length -------------------------------------------------------------------------------

struct preamble {
    unsigned major_version = 0;
    std::uint64_t text_offset_bytes = 0;
    std::uint64_t text_size_bytes = 0;
};

preamble parse_preamble(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    const auto byte_at = [&](std::size_t index) { return std::to_integer<unsigned>(bytes[index]); };
    const std::size_t present = std::min(bytes.size(), magic.size());
    const std::string_view begin(reinterpret_cast<const char*>(bytes.data()), present);
    if (begin != magic.substr(0, present))
        fail("it is not a .npy file, as it does not begin with \\x93NUMPY");
    if (file_size_bytes < 10 || bytes.size() < 10) {
        fail("the file ends after {} bytes, within the .npy header", file_size_bytes);
    }

    const unsigned major_version = byte_at(6);
    const unsigned minor_version = byte_at(7);
    if (major_version < 1 || major_version > 3 || minor_version != 0) {
        fail("its .npy version is {}.{}; 1.0, 2.0 and 3.0 exist", major_version, minor_version);
    }
    const std::size_t length_size = major_version == 1 ? 2 : 4;
    preamble result{major_version, 8 + length_size, 0};
    if (file_size_bytes < result.text_offset_bytes || bytes.size() < result.text_offset_bytes) {
        fail("the file ends after {} bytes, within the .npy header", file_size_bytes);
    }
    for (std::size_t index = 0; index < length_size; ++index) {
        result.text_size_bytes |= std::uint64_t{byte_at(8 + index)} << (8 * index);
    }
    if (result.text_size_bytes > file_size_bytes - result.text_offset_bytes) {
        fail("the header's length is given as {} bytes, but only {} follow in the file",
             result.text_size_bytes, file_size_bytes - result.text_offset_bytes);
    }
    const std::uint64_t most_bytes = most_header_characters * (major_version == 3 ? 4 : 1);
    if (result.text_size_bytes > most_bytes) {
        fail("the header is {} bytes long; numpy and pinflow read at most {} characters",
             result.text_size_bytes, most_header_characters);
    }
    return result;
}

// ---- text -------------------------------------------------------------------------------------------------

/// Characters of UTF-8 text (RFC 3629); empty when it is malformed.
std::optional<std::uint64_t> count_utf8_characters(std::string_view text) {
    std::uint64_t count = 0;
    for (std::size_t index = 0; index < text.size(); ++count) {
        const auto byte_at = [&](std::size_t at) {
            return std::uint32_t{static_cast<unsigned char>(text[at])};
        };
        const std::uint32_t lead = byte_at(index++);
        if (lead < 0x80) continue;
        const unsigned following = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
        if (lead < 0xC2 || lead > 0xF4 || text.size() - index < following) return std::nullopt;
        std::uint32_t code = lead & (0x3Fu >> following);
        for (unsigned step = 0; step < following; ++step, ++index) {
            if ((byte_at(index) & 0xC0) != 0x80) return std::nullopt;
            code = code << 6 | (byte_at(index) & 0x3F);
        }
        const bool overlong = (following == 2 && code < 0x800) || (following == 3 && code < 0x10000);
        if (overlong || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return std::nullopt;
    }
    return count;
}

/// Reads the Python literal token by token. No function of it calls itself: nesting is counted in a small
/// array.
class header_parser {
 public:
    header_parser(std::string_view text, unsigned major_version)
        : text_(text), major_version_(major_version) {}

    /// Everything but the data's offset.
    npy_header parse() {
        if (peek() != '{') fail_at("'{'");
        ++position_;
        while (!accept('}')) {
            parse_entry();
            if (accept('}')) break;
            expect(',');
        }
        parse_padding();
        if (!descr_given_) fail("the header lacks the key 'descr'");
        if (!fortran_order_) fail("the header lacks the key 'fortran_order'");
        if (!shape_) fail("the header lacks the key 'shape'");
        if (!descr_)
            throw unsupported("structured types are not supported; store each field as an array of its own");
        return {dtype::parse(*descr_), *fortran_order_, std::move(*shape_), 0};
    }

 private:
    void parse_entry() {
        skip_space();
        const std::string_view key = parse_string();
        expect(':');
        skip_space();
        const auto refuse_duplicate = [&](bool given) {
            if (given) fail("the header has the key '{}' twice", key);
        };
        if (key == "descr") {
            refuse_duplicate(descr_given_);
            parse_descr();
        } else if (key == "fortran_order") {
            refuse_duplicate(fortran_order_.has_value());
            fortran_order_ = parse_bool();
        } else if (key == "shape") {
            refuse_duplicate(shape_.has_value());
            shape_ = parse_shape();
        } else {
            fail("the header has the unknown key {}", detail::quote(key));
        }
    }

    /// Fills descr_, or leaves it empty for a structured type.
    void parse_descr() {
        descr_given_ = true;
        if (peek() == '[' || peek() == '(') {
            skip_structured_type();
        } else {
            descr_ = parse_string();
        }
    }

    bool parse_bool() {
        for (const bool value : {true, false}) {
            const std::string_view word = value ? "True" : "False";
            if (text_.substr(position_).starts_with(word)) {
                position_ += word.size();
                return value;
            }
        }
        fail_at("True or False as fortran_order");
    }

    shape_vector parse_shape() {
        shape_vector shape;
        expect('(');
        bool comma = false;
        while (!accept(')')) {
            if (!shape.empty() && !comma) fail_at("',' or ')' in the shape");
            if (shape.size() == most_axes) fail("the shape has more than {} axes", most_axes);
            shape.push_back(parse_length());
            comma = accept(',');
        }
        if (shape.size() == 1 && !comma) fail("the shape ({}) is a number, not a tuple", shape[0]);
        return shape;
    }

    std::uint64_t parse_length() {
        skip_space();
        const char* const begin = text_.data() + position_;
        std::uint64_t value = 0;
        const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
        const std::string_view digits(begin, static_cast<std::size_t>(end - begin));
        if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) fail_at("a length in the shape");
        if (error != std::errc() || value > largest_size) {
            fail("the shape has the length {}, which is more than numpy allows", digits.substr(0, 40));
        }
        position_ += digits.size();
        // Python 2 wrote long integers like this; the versions before 3.0 may come from it
        if (major_version_ < 3 && peek() == 'L') ++position_;
        return value;
    }

    /// A string without escapes, none of which occur in what numpy writes there.
    std::string_view parse_string() {
        const std::size_t begin = position_ + 1;
        skip_string();
        const std::string_view content = text_.substr(begin, position_ - 1 - begin);
        if (content.find('\\') != content.npos)
            fail("the header has an escape in {}", detail::quote(content));
        return content;
    }

    void skip_string() {
        const char quote = peek();
        if (quote != '\'' && quote != '"') fail_at("a string");
        for (++position_; peek() != quote; ++position_) {
            if (peek() == '\\') ++position_;
            if (static_cast<unsigned char>(peek()) < ' ') fail_at("the end of a string");
        }
        ++position_;
    }

    /// Passes over a list of fields, whose tokens are checked so that only what looks like one is called a
    /// structured type.
    void skip_structured_type() {
        std::array<char, 64> closing;
        std::size_t depth = 0;
        do {
            const char next = peek();
            if (next == '[' || next == '(') {
                if (depth == closing.size())
                    fail("the header's brackets are nested more than {} deep", closing.size());
                closing[depth++] = next == '[' ? ']' : ')';
                ++position_;
            } else if (next == closing[depth - 1]) {
                --depth;
                ++position_;
            } else if (next == '\'' || next == '"') {
                skip_string();
            } else if ((next >= '0' && next <= '9') || next == ',' || at_python_2_mark()) {
                ++position_;
            } else {
                fail_at("a part of a structured type");
            }
            if (depth > 0) skip_space();
        } while (depth > 0);
    }

    /// The letter of `2L`, or of a title like `u'title'`.
    bool at_python_2_mark() const noexcept {
        return (peek() == 'L' && major_version_ < 3) ||
               (peek() == 'u' && text_.substr(position_ + 1).find_first_of("'\"") == 0);
    }

    /// What may follow the dictionary: spaces, then line ends.
    void parse_padding() {
        while (peek() == ' ' || peek() == '\t')
            ++position_;
        while (peek() == '\n')
            ++position_;
        if (position_ != text_.size()) fail_at("nothing but padding");
    }

    void skip_space() {
        while (peek() == ' ' || peek() == '\t' || peek() == '\n')
            ++position_;
    }

    /// The next character; NUL, which no token begins with, at the end.
    char peek() const noexcept { return position_ < text_.size() ? text_[position_] : '\0'; }

    bool accept(char wanted) {
        skip_space();
        if (peek() != wanted) return false;
        ++position_;
        return true;
    }

    void expect(char wanted) {
        if (!accept(wanted)) fail_at(fmt::format("'{}'", wanted));
    }

    [[noreturn]] void fail_at(std::string_view wanted) const {
        if (position_ >= text_.size()) fail("the header ends where {} should be", wanted);
        fail("the header has {} at character {}, where {} should be",
             detail::quote(text_.substr(position_, 20)), position_, wanted);
    }

    std::string_view text_;
    unsigned major_version_;
    std::size_t position_ = 0;
    bool descr_given_ = false;
    std::optional<std::string_view> descr_;
    std::optional<bool> fortran_order_;
    std::optional<shape_vector> shape_;
};

// ---- sizes ------------------------------------------------------------------------------------------------

/// @throws format_error unless the array that the header promises lies within the file.
void check_size(const npy_header& header, std::uint64_t file_size_bytes) {
    const std::uint64_t item_size_bytes = header.dtype.size_bytes();
    // as numpy does, a length of 0 is left out at first: what the other axes would need must be countable
    // anyway
    std::uint64_t size_bytes = item_size_bytes;
    for (const std::uint64_t length : header.shape) {
        if (length == 0) continue;
        if (!detail::multiply(size_bytes, length, size_bytes) || size_bytes > largest_size) {
            fail("the shape {} of {}-byte elements is larger than any file", to_string(header.shape),
                 item_size_bytes);
        }
    }
    if (std::ranges::find(header.shape, 0u) != header.shape.end()) size_bytes = 0;
    if (size_bytes > file_size_bytes - header.data_offset_bytes) {
        std::uint64_t needed = 0;
        if (!detail::add(header.data_offset_bytes, size_bytes, needed) || needed > largest_size) {
            fail("the shape {} of {}-byte elements is larger than any file", to_string(header.shape),
                 item_size_bytes);
        }
        fail("header promises {} bytes of data, file has {}", size_bytes,
             file_size_bytes - header.data_offset_bytes);
    }
}

}  // namespace

std::uint64_t detail::npy_data_offset_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    const preamble start = parse_preamble(bytes, file_size_bytes);
    return start.text_offset_bytes + start.text_size_bytes;
}

npy_header parse_npy_header(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    const preamble start = parse_preamble(bytes, file_size_bytes);
    if (bytes.size() - start.text_offset_bytes < start.text_size_bytes) {
        fail("the header's length is given as {} bytes, but only {} are there", start.text_size_bytes,
             bytes.size() - start.text_offset_bytes);
    }
    const auto text_bytes = bytes.subspan(start.text_offset_bytes, start.text_size_bytes);
    const std::string_view text(reinterpret_cast<const char*>(text_bytes.data()), text_bytes.size());
    if (start.major_version == 3) {
        const auto characters = count_utf8_characters(text);
        if (!characters) fail("the header is not valid UTF-8, as version 3.0 demands");
        if (*characters > most_header_characters) {
            fail("the header is {} characters long; numpy and pinflow read at most {}", *characters,
                 most_header_characters);
        }
    }
    npy_header header = header_parser(text, start.major_version).parse();
    header.data_offset_bytes = start.text_offset_bytes + start.text_size_bytes;
    check_size(header, file_size_bytes);
    return header;
}

std::string format_npy_header(const dtype& type, std::span<const std::uint64_t> shape, bool fortran_order,
                              std::uint64_t alignment_bytes) {
    if (!std::has_single_bit(alignment_bytes) || alignment_bytes < 16 || alignment_bytes > 8192) {
        throw invalid_argument(fmt::format(
            "a .npy file's data cannot be aligned to {} bytes: it takes a power of two from 16 to 8192",
            alignment_bytes));
    }
    if (shape.size() > most_axes) {
        throw invalid_argument(
            fmt::format("a .npy file cannot have {} axes: numpy allows {}", shape.size(), most_axes));
    }
    if (std::ranges::any_of(shape, [](std::uint64_t length) { return length > largest_size; })) {
        throw invalid_argument(fmt::format("numpy allows no axis as long as one of {}", to_string(shape)));
    }

    std::string text = fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}", type.descr(),
                                   fortran_order ? "True" : "False", to_string(shape));
    if (!shape.empty()) {
        // numpy leaves room for the growing axis to reach 21 digits, so that a file can be appended to in
        // place
        constexpr std::size_t most_digits = 21;
        text.append(most_digits - std::to_string(fortran_order ? shape.back() : shape.front()).size(), ' ');
    }
    // with 64 axes and the coarsest alignment the text stays below 10,000 bytes: version 1.0 always holds it
    constexpr std::size_t preamble_size = 10;
    const std::size_t unpadded = preamble_size + text.size() + 1;
    text.append(alignment_bytes - unpadded % alignment_bytes,
                ' ');  // numpy pads by 1 to `alignment`, never by 0
    text += '\n';

    std::string header(magic);
    header += {'\x01', '\x00', static_cast<char>(text.size() & 0xFF), static_cast<char>(text.size() >> 8)};
    return header + text;
}

}  // namespace pinflow
