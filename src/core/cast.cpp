#include "src/core/cast.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/scalar.hpp"

namespace pinflow::detail {

namespace {

using real_types = std::tuple<bool, std::int8_t, std::int16_t, std::int32_t, std::int64_t, std::uint8_t,
                              std::uint16_t, std::uint32_t, std::uint64_t, half_bits, float, double,
                              bfloat16_bits, float8_e4m3fn_bits, float8_e5m2_bits>;
constexpr std::size_t real_type_count = std::tuple_size_v<real_types>;

/// The index in real_types of the type, or of the parts of a complex type. Empty if the type cannot be cast.
std::optional<std::size_t> real_type_index(const dtype& type) noexcept {
    if (!type.is_little_endian()) return std::nullopt;
    const auto of_size = [&](std::size_t first, auto... sizes) -> std::optional<std::size_t> {
        std::size_t index = first;
        const bool found =
            ((type.size_bytes() == static_cast<std::uint64_t>(sizes) || (++index, false)) || ...);
        return found ? std::optional(index) : std::nullopt;
    };
    switch (type.kind()) {
        case dtype_kind::boolean:
            return 0;
        case dtype_kind::signed_integer:
            return of_size(1, 1, 2, 4, 8);
        case dtype_kind::unsigned_integer:
            return of_size(5, 1, 2, 4, 8);
        case dtype_kind::floating:
            return of_size(9, 2, 4, 8);
        case dtype_kind::complex:
            return of_size(10, 8, 16);
        case dtype_kind::bfloat16:
            return 12;
        case dtype_kind::float8_e4m3fn:
            return 13;
        case dtype_kind::float8_e5m2:
            return 14;
        case dtype_kind::float8_e8m0fnu:
        case dtype_kind::float8_e4m3fnuz:
        case dtype_kind::float8_e5m2fnuz:
        case dtype_kind::timedelta:
        case dtype_kind::datetime:
        case dtype_kind::bytes:
        case dtype_kind::unicode:
        case dtype_kind::opaque:
            break;
    }
    return std::nullopt;
}

bool is_complex_kind(const dtype& type) noexcept {
    return type.kind() == dtype_kind::complex;
}

template <typename T>
T load(const std::byte* source) noexcept {
    if constexpr (std::is_same_v<T, bool>) {
        return *source != std::byte{0};
    } else {
        T value;
        std::memcpy(&value, source, sizeof value);
        return value;
    }
}

template <typename From, typename To>
void cast_all(const std::byte* __restrict source, std::byte* __restrict destination,
              std::uint64_t count) noexcept {
    for (std::uint64_t i = 0; i < count; ++i) {
        const To result = cast_scalar<To>(load<From>(source + i * sizeof(From)));
        std::memcpy(destination + i * sizeof(To), &result, sizeof result);
    }
}

using cast_function = void (*)(const std::byte*, std::byte*, std::uint64_t) noexcept;

template <std::size_t From, std::size_t... To>
constexpr std::array<cast_function, real_type_count> casts_from(std::index_sequence<To...>) noexcept {
    return {&cast_all<std::tuple_element_t<From, real_types>, std::tuple_element_t<To, real_types>>...};
}

template <std::size_t... From>
constexpr auto all_casts(std::index_sequence<From...> all) noexcept {
    return std::array{casts_from<From>(all)...};
}

constexpr auto casts = all_casts(std::make_index_sequence<real_type_count>());

}  // namespace

bool can_cast(const dtype& from, const dtype& to) noexcept {
    if (from == to) return true;
    return real_type_index(from) && real_type_index(to) && is_complex_kind(from) == is_complex_kind(to);
}

void cast_elements(const dtype& from, const std::byte* source, const dtype& to, std::byte* destination,
                   std::uint64_t count) {
    if (!can_cast(from, to)) {
        throw invalid_argument(fmt::format(
            "cannot cast elements of type '{}' to '{}': little-endian booleans, integers and "
            "floats of at most 8 bytes can be cast to one another, and complex numbers of at most "
            "16 bytes only to complex numbers",
            from.descr(), to.descr()));
    }
    if (count == 0) return;
    if (from == to) {
        std::memcpy(destination, source, count * from.size_bytes());
        return;
    }
    const std::uint64_t parts = is_complex_kind(from) ? 2 : 1;
    casts[*real_type_index(from)][*real_type_index(to)](source, destination, count * parts);
}

}  // namespace pinflow::detail
