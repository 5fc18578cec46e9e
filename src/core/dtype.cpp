#include "pinflow/dtype.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>

#include "pinflow/error.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

namespace {

/// numpy keeps the size of an element, and the multiplier of a unit, in a C int.
constexpr std::uint64_t largest_int = std::numeric_limits<std::int32_t>::max();

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
            return size_bytes > 0 && size_bytes % 4 == 0 && size_bytes <= largest_int;
        case dtype_kind::bytes:
        case dtype_kind::opaque:
            return size_bytes > 0 && size_bytes <= largest_int;
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

/// `unit` as numpy writes it: "1ns" is "ns". Empty when there is no such unit.
std::optional<std::string> normal_unit(std::string_view unit) {
    const std::size_t digits = std::min(unit.find_first_not_of("0123456789"), unit.size());
    const std::string_view name = unit.substr(digits);
    if (std::ranges::find(time_units, name) == time_units.end()) return std::nullopt;
    if (digits == 0) return std::string(name);
    const auto multiplier = parse_number(unit.substr(0, digits));
    if (!multiplier || *multiplier > largest_int) return std::nullopt;
    return std::string(*multiplier == 1 ? name : unit);
}

struct type_name {
    std::string_view name;
    dtype_kind kind;
    std::uint64_t size_bytes;
};

/// The names that say their size: those of numpy's whose meaning no platform changes.
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

std::optional<dtype_kind> kind_of_letter(char letter) noexcept {
    constexpr std::string_view letters = "biufcmMSUV";
    if (letters.find(letter) == letters.npos) return std::nullopt;
    return static_cast<dtype_kind>(letter);
}

/// What follows "M8" or "datetime64": nothing, or a unit in brackets. Empty when it is neither.
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
    auto size_bytes = parse_number(text.substr(1));
    if (!size_bytes || *size_bytes > largest_int) return std::nullopt;
    if (*kind == dtype_kind::unicode) *size_bytes *= 4;  // counted in characters
    if (!size_exists(*kind, *size_bytes)) return std::nullopt;
    return dtype(*kind, *size_bytes, order, unit);
}

}  // namespace

dtype::dtype(dtype_kind kind, std::uint64_t size_bytes, std::endian order, std::string_view unit)
    : kind_(kind), order_(order), size_bytes_(size_bytes) {
    if (!size_exists(kind, size_bytes)) {
        throw invalid_argument(
            fmt::format("numpy has no type of kind '{}' with {} bytes", static_cast<char>(kind), size_bytes));
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

dtype dtype::parse(std::string_view descr) {
    const std::string_view bare = descr.substr(descr.find_first_of("<>=|") == 0 ? 1 : 0);
    const std::endian order = descr.starts_with('<')   ? std::endian::little
                              : descr.starts_with('>') ? std::endian::big
                                                       : std::endian::native;

    // "O8" and "O4" are how numpy once spelled it
    if (bare == "O" || bare == "O4" || bare == "O8" || descr == "object") {
        throw unsupported(
            fmt::format("type {} means Python objects, stored as a pickle that would have to be executed to "
                        "be read; convert the "
                        "array to a numeric type",
                        detail::quote(descr)));
    }
    if (descr.starts_with('[')) {
        throw unsupported("structured types are not supported; store each field as an array of its own");
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

dtype dtype::little_endian() const {
    dtype result = *this;
    result.order_ = std::endian::little;
    return result;
}

std::string dtype::descr() const {
    const char prefix = swap_size_bytes() == 1 ? '|' : order_ == std::endian::little ? '<' : '>';
    const std::uint64_t length = kind_ == dtype_kind::unicode ? size_bytes_ / 4 : size_bytes_;
    const std::string type = fmt::format("{}{}{}", prefix, static_cast<char>(kind_), length);
    return unit_.empty() ? type : fmt::format("{}[{}]", type, unit_);
}

}  // namespace pinflow
