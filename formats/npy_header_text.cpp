#include "formats/npy_header_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "formats/throw_formatted.hpp"
#include "pinflow/error.hpp"
#include "src/core/quote.hpp"
#include "src/core/utf8.hpp"

// The parser accepts every header that a released numpy writes, except those of pickled objects and of types
// nested more than 32 deep. It accepts nothing that numpy rejects. From other writers it accepts any order of
// keys, either quote, spaces, tabs and '\n' between tokens, Python 2's `2L` and `u'title'`, and a dictionary
// without a trailing comma. Padding is spaces or tabs, then '\n'. It refuses other input that numpy accepts
// but no known writer produces (the table is in tests/npy_header_test.cpp).

namespace pinflow {

namespace {

using detail::max_npy_axes;

/// Limit on nested structured types, which bounds the recursion.
constexpr unsigned max_nested_types = 32;

/// The type of a field: one element, or an array of elements.
struct field_type {
    dtype element;
    shape_vector shape;
};

/// Reads the Python literal token by token.
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
        if (!descr_) detail::throw_format_error("the header lacks the key 'descr'");
        if (!fortran_order_) detail::throw_format_error("the header lacks the key 'fortran_order'");
        if (!shape_) detail::throw_format_error("the header lacks the key 'shape'");
        return {std::move(*descr_), *fortran_order_, std::move(*shape_), 0};
    }

 private:
    void parse_entry() {
        skip_space();
        const std::string_view key = parse_string();
        expect(':');
        skip_space();
        const auto refuse_duplicate = [&](bool given) {
            if (given) detail::throw_format_error("the header has the key '{}' twice", key);
        };
        if (key == "descr") {
            refuse_duplicate(descr_.has_value());
            descr_ = peek() == '[' ? parse_structured_type(1) : parse_type_string();
        } else if (key == "fortran_order") {
            refuse_duplicate(fortran_order_.has_value());
            fortran_order_ = parse_bool();
        } else if (key == "shape") {
            refuse_duplicate(shape_.has_value());
            shape_ = parse_shape();
        } else {
            detail::throw_format_error("the header has the unknown key {}", detail::quote(key));
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

    // ---- types

    dtype parse_type_string() {
        const std::string_view descr = parse_string();
        if (!descr.starts_with('[')) {
            dtype type = dtype::parse(descr);
            if (type.is_known_to_numpy()) return type;
        }
        detail::throw_format_error("type {} is not one that numpy writes", detail::quote(descr));
    }

    /// A list of fields, whose offsets are the sums of the sizes before them, as in numpy's descr_to_dtype.
    dtype parse_structured_type(unsigned depth) {
        if (depth > max_nested_types) {
            detail::throw_format_error("the header's structured types are nested more than {} deep",
                                       max_nested_types);
        }
        expect('[');
        std::vector<dtype_field> fields;
        std::uint64_t size_bytes = 0;
        try {
            while (!accept(']')) {
                dtype_field field = parse_field(depth);
                field.offset_bytes = size_bytes;
                size_bytes += field.size_bytes();  // of at most 10,000 fields, each below 2^31
                if (!is_gap(field)) fields.push_back(std::move(field));
                if (accept(']')) break;
                expect(',');
            }
            return dtype::structured(std::move(fields), size_bytes);
        } catch (const invalid_argument& failure) {
            detail::throw_format_error("{}", failure.what());
        }
    }

    /// numpy writes the bytes between fields as a field '' of raw bytes. It also reads a field '' of any
    /// array as such bytes.
    static bool is_gap(const dtype_field& field) {
        const bool raw = field.type.kind() == dtype_kind::opaque && !field.type.is_structured();
        return field.name.empty() && field.title.empty() && (raw || !field.shape.empty());
    }

    /// Everything but the offset.
    dtype_field parse_field(unsigned depth) {
        expect('(');
        auto [title, name] = parse_field_names();
        expect(',');
        field_type type = parse_field_type(depth);
        if (accept(',') && !next_is(')')) {
            type = array_of(parse_field_shape(), std::move(type));
            accept(',');
        }
        expect(')');
        return {std::move(name), std::move(title), std::move(type.element), std::move(type.shape), 0};
    }

    /// A name, or (title, name).
    std::pair<std::string, std::string> parse_field_names() {
        if (!accept('(')) return {std::string(), parse_name()};
        std::string title = parse_title();
        expect(',');
        std::string name = parse_name();
        accept(',');
        expect(')');
        return {std::move(title), std::move(name)};
    }

    std::string parse_title() {
        skip_space();
        if (peek() == 'u' && major_version_ < 3) ++position_;  // Python 2 wrote titles like this
        std::string title = parse_name();
        if (title.empty()) detail::throw_format_error("the header has a field with an empty title");
        return title;
    }

    /// A string, a list of fields, or (type, shape), which numpy writes for arrays of arrays.
    field_type parse_field_type(unsigned depth) {
        skip_space();
        if (peek() == '[') return {parse_structured_type(depth + 1), {}};
        if (peek() != '(') return {parse_type_string(), {}};
        if (depth == max_nested_types) {
            detail::throw_format_error("the header's structured types are nested more than {} deep",
                                       max_nested_types);
        }
        expect('(');
        field_type type = parse_field_type(depth + 1);
        expect(',');
        type = array_of(parse_field_shape(), std::move(type));
        accept(',');
        expect(')');
        return type;
    }

    static field_type array_of(shape_vector shape, field_type type) {
        if (std::ranges::count(type.shape, 0u) > 0) {
            detail::throw_format_error(
                "the header has an array of arrays without bytes, which numpy rejects");
        }
        shape.insert(shape.end(), type.shape.begin(), type.shape.end());
        return {std::move(type.element), std::move(shape)};
    }

    shape_vector parse_field_shape() {
        skip_space();
        shape_vector shape;
        if (peek() == '(') {
            shape = parse_shape();
        } else {
            shape.push_back(parse_length());
            // numpy reads it as no axis, and warns that it will be one axis in the future
            if (shape[0] == 1)
                detail::throw_format_error("the header has a field of the shape 1, which is not a tuple");
        }
        for (const std::uint64_t length : shape) {
            if (length > INT32_MAX)
                detail::throw_format_error("a field has the length {}, which is more than numpy allows",
                                           length);
        }
        return shape;
    }

    // ---- shapes

    shape_vector parse_shape() {
        shape_vector shape;
        expect('(');
        bool comma = false;
        while (!accept(')')) {
            if (!shape.empty() && !comma) fail_at("',' or ')' in the shape");
            if (shape.size() == max_npy_axes)
                detail::throw_format_error("the shape has more than {} axes", max_npy_axes);
            shape.push_back(parse_length());
            comma = accept(',');
        }
        if (shape.size() == 1 && !comma)
            detail::throw_format_error("the shape ({}) is a number, not a tuple", shape[0]);
        return shape;
    }

    std::uint64_t parse_length() {
        skip_space();
        const char* const begin = text_.data() + position_;
        std::uint64_t value = 0;
        const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
        const std::string_view digits(begin, static_cast<std::size_t>(end - begin));
        if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) fail_at("a length in the shape");
        if (error != std::errc() || value > detail::max_npy_size_bytes) {
            detail::throw_format_error("the shape has the length {}, which is more than numpy allows",
                                       digits.substr(0, 40));
        }
        position_ += digits.size();
        // Python 2 wrote long integers like this; the versions before 3.0 may come from it
        if (major_version_ < 3 && peek() == 'L') ++position_;
        return value;
    }

    // ---- strings

    /// A string without escapes: numpy writes none in keys and types.
    std::string_view parse_string() {
        const std::string_view content = parse_quoted();
        if (content.find('\\') != content.npos)
            detail::throw_format_error("the header has an escape in {}", detail::quote(content));
        return content;
    }

    /// The name of a field, as UTF-8: Python's repr() escapes what does not print.
    std::string parse_name() {
        skip_space();
        const std::string_view content = parse_quoted();
        std::string name;
        for (std::size_t at = 0; at < content.size();) {
            if (content[at] == '\\') {
                detail::append_utf8(name, parse_escape(content, at));
            } else if (major_version_ == 3) {
                name += content[at++];
            } else {
                detail::append_utf8(name, static_cast<unsigned char>(content[at++]));
            }
        }
        return name;
    }

    /// Decodes the escape at `at`, and moves `at` past it.
    static std::uint32_t parse_escape(std::string_view content, std::size_t& at) {
        // the string does not end in a single backslash, which would have escaped its quote
        const char letter = content[at + 1];
        const std::size_t digits_begin = at + 2;
        std::size_t digits = 0;
        switch (letter) {
            case '\\':
            case '\'':
            case '"':
                at += 2;
                return static_cast<unsigned char>(letter);
            case 'n':
                at += 2;
                return '\n';
            case 'r':
                at += 2;
                return '\r';
            case 't':
                at += 2;
                return '\t';
            case 'x':
                digits = 2;
                break;
            case 'u':
                digits = 4;
                break;
            case 'U':
                digits = 8;
                break;
            default:
                detail::throw_format_error("the header has an unknown escape in the name {}",
                                           detail::quote(content));
        }
        const std::string_view number = content.substr(digits_begin, digits);
        std::uint32_t code = 0;
        const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), code, 16);
        const bool complete = error == std::errc() && end == number.data() + digits;
        if (!complete || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
            detail::throw_format_error("the header has an escape that stands for no character in the name {}",
                                       detail::quote(content));
        }
        at = digits_begin + digits;
        return code;
    }

    /// The text between the quotes, with its escapes.
    std::string_view parse_quoted() {
        const char quote = peek();
        if (quote != '\'' && quote != '"') fail_at("a string");
        const std::size_t begin = ++position_;
        for (; peek() != quote; ++position_) {
            if (peek() == '\\') ++position_;
            if (static_cast<unsigned char>(peek()) < ' ') fail_at("the end of a string");
        }
        return text_.substr(begin, position_++ - begin);
    }

    // ---- tokens

    /// Parses the padding after the dictionary: spaces and tabs, then line ends.
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

    bool next_is(char wanted) {
        skip_space();
        return peek() == wanted;
    }

    bool accept(char wanted) {
        if (!next_is(wanted)) return false;
        ++position_;
        return true;
    }

    void expect(char wanted) {
        if (!accept(wanted)) fail_at(fmt::format("'{}'", wanted));
    }

    [[noreturn]] void fail_at(std::string_view wanted) const {
        if (position_ >= text_.size())
            detail::throw_format_error("the header ends where {} should be", wanted);
        detail::throw_format_error("the header has {} at character {}, where {} should be",
                                   detail::quote(text_.substr(position_), 20), position_, wanted);
    }

    std::string_view text_;
    unsigned major_version_;
    std::size_t position_ = 0;
    std::optional<dtype> descr_;
    std::optional<bool> fortran_order_;
    std::optional<shape_vector> shape_;
};

}  // namespace

npy_header detail::parse_npy_header_text(std::string_view text, unsigned major_version) {
    return header_parser(text, major_version).parse();
}

}  // namespace pinflow
