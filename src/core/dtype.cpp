#include "pinflow/dtype.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"
#include "src/core/utf8.hpp"

namespace pinflow {

namespace {

/// numpy stores the size of an element, and the multiplier of a unit, in a C int.
constexpr std::uint64_t max_int = std::numeric_limits<std::int32_t>::max();
/// numpy 2's limit on the axes of an array field; numpy 1 allows 32.
constexpr std::size_t max_axes = 64;

constexpr std::array<std::string_view, 13> time_units = {"Y",  "M",  "W",  "D",  "h",  "m", "s",
                                                         "ms", "us", "ns", "ps", "fs", "as"};

bool is_time(dtype_kind kind) noexcept {
    return kind == dtype_kind::datetime || kind == dtype_kind::timedelta;
}

bool size_exists(dtype_kind kind, std::uint64_t size_bytes) noexcept {
    const auto is_one_of = [size_bytes](auto... sizes) { return ((size_bytes == sizes) || ...); };
    switch (kind) {
        case dtype_kind::boolean:
            return is_one_of(1u);
        case dtype_kind::signed_integer:
        case dtype_kind::unsigned_integer:
            return is_one_of(1u, 2u, 4u, 8u);
        case dtype_kind::floating:
            return is_one_of(2u, 4u, 8u, 16u);
        case dtype_kind::complex:
            return is_one_of(8u, 16u, 32u);
        case dtype_kind::timedelta:
        case dtype_kind::datetime:
            return is_one_of(8u);
        case dtype_kind::unicode:
            return size_bytes % 4 == 0 && size_bytes <= max_int;
        case dtype_kind::bytes:
        case dtype_kind::opaque:
            return size_bytes <= max_int;
        case dtype_kind::bfloat16:
            return is_one_of(2u);
        case dtype_kind::float8_e4m3fn:
        case dtype_kind::float8_e5m2:
        case dtype_kind::float8_e8m0fnu:
        case dtype_kind::float8_e4m3fnuz:
        case dtype_kind::float8_e5m2fnuz:
            return is_one_of(1u);
    }
    return false;
}

/// A number as numpy writes it: digits alone, without a leading zero.
std::optional<std::uint64_t> parse_number(std::string_view text) noexcept {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || text.front() == '0') return std::nullopt;
    return value;
}

/// `unit` as numpy writes it: "1ns" is "ns". Empty if there is no such unit.
std::optional<std::string> normal_unit(std::string_view unit) {
    const std::size_t digits = std::min(unit.find_first_not_of("0123456789"), unit.size());
    const std::string_view name = unit.substr(digits);
    if (std::ranges::find(time_units, name) == time_units.end()) return std::nullopt;
    if (digits == 0) return std::string(name);
    const auto multiplier = parse_number(unit.substr(0, digits));
    if (!multiplier || *multiplier > max_int) return std::nullopt;
    return std::string(*multiplier == 1 ? name : unit);
}

struct type_name {
    std::string_view name;
    dtype_kind kind;
    std::uint64_t size_bytes;
};

/// numpy's type names with a size, which is the same on every platform (unlike that of "long" or
/// "longdouble").
constexpr type_name type_names[] = {
    {"bool", dtype_kind::boolean, 1},
    {"int8", dtype_kind::signed_integer, 1},
    {"int16", dtype_kind::signed_integer, 2},
    {"int32", dtype_kind::signed_integer, 4},
    {"int64", dtype_kind::signed_integer, 8},
    {"uint8", dtype_kind::unsigned_integer, 1},
    {"uint16", dtype_kind::unsigned_integer, 2},
    {"uint32", dtype_kind::unsigned_integer, 4},
    {"uint64", dtype_kind::unsigned_integer, 8},
    {"float16", dtype_kind::floating, 2},
    {"float32", dtype_kind::floating, 4},
    {"float64", dtype_kind::floating, 8},
    {"float128", dtype_kind::floating, 16},
    {"complex64", dtype_kind::complex, 8},
    {"complex128", dtype_kind::complex, 16},
    {"complex256", dtype_kind::complex, 32},
};

/// ml_dtypes' names of types that numpy lacks.
constexpr type_name other_type_names[] = {
    {"bfloat16", dtype_kind::bfloat16, 2},
    {"float8_e4m3fn", dtype_kind::float8_e4m3fn, 1},
    {"float8_e5m2", dtype_kind::float8_e5m2, 1},
    {"float8_e8m0fnu", dtype_kind::float8_e8m0fnu, 1},
    {"float8_e4m3fnuz", dtype_kind::float8_e4m3fnuz, 1},
    {"float8_e5m2fnuz", dtype_kind::float8_e5m2fnuz, 1},
};

std::optional<dtype_kind> kind_of_letter(char letter) noexcept {
    constexpr std::string_view letters = "biufcmMSUV";
    if (letters.find(letter) == letters.npos) return std::nullopt;
    return static_cast<dtype_kind>(letter);
}

/// Parses the text after "M8" or "datetime64": nothing, or a unit in brackets. Returns std::nullopt for any
/// other text.
std::optional<std::string> parse_bracketed_unit(std::string_view text) {
    if (text.empty() || text == "[generic]") return std::string();
    if (!text.starts_with('[') || !text.ends_with(']')) return std::nullopt;
    return normal_unit(text.substr(1, text.size() - 2));
}

std::optional<dtype> parse_name(std::string_view text) {
    for (const type_name& known : type_names) {
        if (text == known.name) return dtype(known.kind, known.size_bytes, std::endian::native);
    }
    for (const auto& [prefix, kind] : {std::pair(std::string_view("datetime64"), dtype_kind::datetime),
                                       std::pair(std::string_view("timedelta64"), dtype_kind::timedelta)}) {
        if (!text.starts_with(prefix)) continue;
        if (const auto unit = parse_bracketed_unit(text.substr(prefix.size()))) {
            return dtype(kind, 8, std::endian::native, *unit);
        }
    }
    return std::nullopt;
}

/// A letter and a size, such as "f4", "U10", "M8[ns]".
std::optional<dtype> parse_letter_and_size(std::string_view text, std::endian order) {
    if (text.empty()) return std::nullopt;
    const auto kind = kind_of_letter(text.front());
    if (!kind) return std::nullopt;
    std::string unit;
    if (is_time(*kind)) {
        const std::size_t size_end = std::min<std::size_t>(2, text.size());
        auto parsed_unit = parse_bracketed_unit(text.substr(size_end));
        if (!parsed_unit) return std::nullopt;
        unit = std::move(*parsed_unit);
        text = text.substr(0, size_end);
    }
    // numpy writes |S0, <U0 and |V0; no other kind has a type of size 0
    auto size_bytes = text.substr(1) == "0" ? std::optional<std::uint64_t>(0) : parse_number(text.substr(1));
    if (!size_bytes || *size_bytes > max_int) return std::nullopt;
    if (*kind == dtype_kind::unicode) *size_bytes *= 4;  // counted in characters
    if (!size_exists(*kind, *size_bytes)) return std::nullopt;
    return dtype(*kind, *size_bytes, order, unit);
}

// ---- structured types -------------------------------------------------------------------------------------

/// Text as Python's repr() writes it, so that headers equal numpy's. Python also escapes characters beyond
/// Latin-1 that cannot be printed. They are written unescaped here, and are read back the same.
std::string python_string(std::string_view text) {
    const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
    std::string result(1, quote);
    for (std::size_t position = 0; position < text.size();) {
        const std::uint32_t code = detail::next_code_point(text, position).value_or('?');
        if (code == '\\' || code == static_cast<unsigned char>(quote)) {
            result += '\\';
            result += static_cast<char>(code);
        } else if (code == '\n' || code == '\r' || code == '\t') {
            result += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
        } else if (code < ' ' || (code >= 0x7F && code <= 0xA0) || code == 0xAD) {
            result += fmt::format("\\x{:02x}", code);
        } else {
            detail::append_utf8(result, code);
        }
    }
    return result + quote;
}

/// Checks the name of a field.
/// @throws invalid_argument if it is not a valid name, or if another field has it.
void check_name(std::string_view name, std::set<std::string_view>& names) {
    if (name.empty()) throw invalid_argument("a field of a structured type cannot have an empty name");
    if (!detail::count_code_points(name)) {
        throw invalid_argument(fmt::format("the field name {} is not valid UTF-8", detail::quote(name)));
    }
    if (!names.insert(name).second) {
        throw invalid_argument(
            fmt::format("two fields of a structured type are called {}", detail::quote(name)));
    }
}

std::string gap(std::uint64_t size_bytes) {
    return fmt::format("('', '|V{}')", size_bytes);
}

std::string field_descr(const dtype_field& field) {
    std::string name = python_string(field.name);
    if (!field.title.empty()) name = fmt::format("({}, {})", python_string(field.title), name);
    const std::string type =
        field.type.is_structured() ? field.type.descr() : fmt::format("'{}'", field.type.descr());
    return field.shape.empty() ? fmt::format("({}, {})", name, type)
                               : fmt::format("({}, {}, {})", name, type, to_string(field.shape));
}

/// A list of fields as numpy writes it: offsets, and bytes after the last field, appear only as gaps.
std::string structured_descr(std::span<const dtype_field> fields, std::uint64_t size_bytes) {
    std::string list;
    std::uint64_t end = 0;
    const auto add = [&](const std::string& part) { list += (list.empty() ? "" : ", ") + part; };
    for (const dtype_field& field : fields) {
        if (field.offset_bytes > end) add(gap(field.offset_bytes - end));
        add(field_descr(field));
        end = field.offset_bytes + field.size_bytes();
    }
    if (size_bytes > end) add(gap(size_bytes - end));
    return fmt::format("[{}]", list);
}

}  // namespace

dtype::dtype(dtype_kind kind, std::uint64_t size_bytes, std::endian order, std::string_view unit)
    : kind_(kind), order_(order), size_bytes_(size_bytes) {
    if (!size_exists(kind, size_bytes)) {
        throw invalid_argument(
            fmt::format("no type of kind '{}' has {} bytes", static_cast<char>(kind), size_bytes));
    }
    if (!unit.empty()) {
        const auto normal = is_time(kind) ? normal_unit(unit) : std::nullopt;
        if (!normal) {
            throw invalid_argument(fmt::format("a type of kind '{}' cannot have the unit {}",
                                               static_cast<char>(kind), detail::quote(unit)));
        }
        unit_ = *normal;
    }
    if (swap_size_bytes() == 1) order_ = std::endian::little;
}

dtype dtype::structured(std::vector<dtype_field> fields, std::uint64_t size_bytes) {
    if (size_bytes > max_int) {
        throw invalid_argument(fmt::format("a structured type cannot have {} bytes: numpy allows at most {}",
                                           size_bytes, max_int));
    }
    std::set<std::string_view> names;
    std::uint64_t end = 0;
    for (const dtype_field& field : fields) {
        check_name(field.name, names);
        if (!field.title.empty()) check_name(field.title, names);
        const std::uint64_t field_size_bytes = field.size_bytes();
        if (field.offset_bytes < end) {
            throw invalid_argument(
                fmt::format("the field {} begins at offset {}, but the field before it ends at offset {}: "
                            "fields must be in the order of their offsets, and cannot overlap",
                            detail::quote(field.name), field.offset_bytes, end));
        }
        if (field.offset_bytes > size_bytes || field_size_bytes > size_bytes - field.offset_bytes) {
            throw invalid_argument(
                fmt::format("the field {} does not fit into its type: it has {} bytes at offset {}, the type "
                            "has {} bytes",
                            detail::quote(field.name), field_size_bytes, field.offset_bytes, size_bytes));
        }
        end = field.offset_bytes + field_size_bytes;
    }
    dtype result(dtype_kind::opaque, size_bytes);
    result.fields_ = std::make_shared<const std::vector<dtype_field>>(std::move(fields));
    return result;
}

dtype dtype::parse(std::string_view descr) {
    const std::string_view bare = descr.substr(descr.find_first_of("<>=|") == 0 ? 1 : 0);
    const std::endian order = descr.starts_with('<')   ? std::endian::little
                              : descr.starts_with('>') ? std::endian::big
                                                       : std::endian::native;

    // numpy once wrote "O8" and "O4"
    if (bare == "O" || bare == "O4" || bare == "O8" || descr == "object") {
        throw unsupported(
            fmt::format("type {} means Python objects, stored as a pickle that would have to be executed to "
                        "be read; convert the "
                        "array to a numeric type",
                        detail::quote(descr)));
    }
    if (descr.starts_with('[')) {
        throw unsupported(fmt::format(
            "the list {} is not read as a type; open one field of the array instead", detail::quote(descr)));
    }
    for (const type_name& known : other_type_names) {
        if (bare == known.name) return {known.kind, known.size_bytes, order};
    }
    if (const auto type = parse_letter_and_size(bare, order)) return *type;
    if (const auto type = parse_name(descr)) return *type;
    throw format_error(fmt::format("type {} is not one that numpy writes", detail::quote(descr)));
}

std::uint64_t dtype::swap_size_bytes() const noexcept {
    switch (kind_) {
        case dtype_kind::bytes:
        case dtype_kind::opaque:
            return 1;
        case dtype_kind::unicode:
            return 4;
        case dtype_kind::complex:
            return size_bytes_ / 2;
        default:
            return size_bytes_;
    }
}

std::span<const dtype_field> dtype::fields() const noexcept {
    return fields_ ? std::span<const dtype_field>(*fields_) : std::span<const dtype_field>();
}

dtype dtype::little_endian() const {
    dtype result = *this;
    result.order_ = std::endian::little;
    if (is_little_endian() || !fields_) return result;
    std::vector<dtype_field> fields = *fields_;
    for (dtype_field& field : fields)
        field.type = field.type.little_endian();
    result.fields_ = std::make_shared<const std::vector<dtype_field>>(std::move(fields));
    return result;
}

bool dtype::is_little_endian() const noexcept {
    return order_ == std::endian::little && std::ranges::all_of(fields(), [](const dtype_field& field) {
               return field.type.is_little_endian();
           });
}

bool dtype::is_known_to_numpy() const noexcept {
    return std::ranges::find(other_type_names, kind_, &type_name::kind) == std::ranges::end(other_type_names);
}

std::string dtype::descr() const {
    if (fields_) return structured_descr(*fields_, size_bytes_);
    for (const type_name& known : other_type_names) {
        if (kind_ != known.kind) continue;
        return fmt::format("{}{}", order_ == std::endian::big ? ">" : "", known.name);
    }
    const char prefix = swap_size_bytes() == 1 ? '|' : order_ == std::endian::little ? '<' : '>';
    const std::uint64_t length = kind_ == dtype_kind::unicode ? size_bytes_ / 4 : size_bytes_;
    const std::string type = fmt::format("{}{}{}", prefix, static_cast<char>(kind_), length);
    return unit_.empty() ? type : fmt::format("{}[{}]", type, unit_);
}

bool operator==(const dtype& a, const dtype& b) {
    const bool same =
        a.kind_ == b.kind_ && a.order_ == b.order_ && a.size_bytes_ == b.size_bytes_ && a.unit_ == b.unit_;
    return same && (a.fields_ == b.fields_ ||
                    (a.is_structured() && b.is_structured() && std::ranges::equal(a.fields(), b.fields())));
}

std::uint64_t dtype_field::size_bytes() const {
    if (shape.size() > max_axes) {
        throw invalid_argument(fmt::format("the field {} has {} axes: numpy allows {}", detail::quote(name),
                                           shape.size(), max_axes));
    }
    if (!shape.empty() && type.size_bytes() == 0 && !type.is_structured()) {
        throw invalid_argument(fmt::format("the field {} is an array of {}, which numpy rejects",
                                           detail::quote(name), type.descr()));
    }
    // lengths of 0 are left out at first, so that the size of the other axes is checked in any case
    std::uint64_t size = std::max<std::uint64_t>(type.size_bytes(), 1);
    bool empty = type.size_bytes() == 0;
    for (const std::uint64_t length : shape) {
        if (length == 0) {
            empty = true;
        } else if (!detail::multiply(size, length, size) || size > max_int) {
            throw invalid_argument(
                fmt::format("the field {} of shape {} and {}-byte elements is larger than numpy allows",
                            detail::quote(name), to_string(shape), type.size_bytes()));
        }
    }
    return empty ? 0 : size;
}

}  // namespace pinflow
