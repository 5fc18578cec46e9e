#pragma once

#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#define PINFLOW_DETAIL_HOST_DEVICE __host__ __device__
#else
#define PINFLOW_DETAIL_HOST_DEVICE
#endif

/// Conversions of one number, for the host and for CUDA. Both give the same bits.
///
/// To a float: every source is rounded once, to nearest, ties to even (IEEE 754-2019, 4.3.1). A value that
/// rounds beyond the largest finite number becomes infinite. In float8_e4m3fn, which has no infinities, it
/// becomes NaN, as in ml_dtypes (non-saturating in the OCP 8-bit Floating Point Specification (OFP8) 1.0). A
/// NaN becomes a quiet NaN with the same sign, and with the payload as far as it fits (IEEE 754-2019, 6.2.3).
/// Conversions to bfloat16, and to and from 8-bit floats, drop the payload, as in ml_dtypes. To an integer:
/// truncated toward zero; a value out of range becomes the nearest limit, and NaN becomes 0. To bool: true if
/// not zero. Complex numbers: each part separately.
///
/// The floating-point environment must be the default: rounding to nearest, subnormals not flushed.
namespace pinflow::detail {

// ---- storage: the bits of floats that C++20 has no types for ------------------------------------

/// IEEE 754 binary16.
struct half_bits {
    std::uint16_t bits;
};
/// The upper half of a float.
struct bfloat16_bits {
    std::uint16_t bits;
};
/// OFP8 E4M3.
struct float8_e4m3fn_bits {
    std::uint8_t bits;
};
/// OFP8 E5M2.
struct float8_e5m2_bits {
    std::uint8_t bits;
};

template <typename Part>
struct complex_parts {
    Part real;
    Part imaginary;
};

/// A number of 16 bytes, in the order of memory.
struct word_pair {
    std::uint64_t first;
    std::uint64_t second;
};

// ---- formats: IEEE 754-2019, 3.4; OFP8 1.0, 5 ---------------------------------------------------

/// What the bits of a float mean: a sign, an exponent field, and the mantissa_bits below it. `highest`,
/// `overflow` and `quiet_nan` are magnitudes: the largest finite number, the result of an overflow, and the
/// NaN made here.
template <typename Float>
struct float_format {
    static constexpr bool exists = false;
};

template <>
struct float_format<half_bits> {
    using word = std::uint16_t;
    static constexpr bool exists = true;
    static constexpr int mantissa_bits = 10;
    static constexpr int bias = 15;
    static constexpr word highest = 0x7BFF;
    static constexpr word overflow = 0x7C00;
    static constexpr word quiet_nan = 0x7E00;
    static constexpr bool has_infinity = true;
    static constexpr bool keeps_payload = true;
};

template <>
struct float_format<bfloat16_bits> {
    using word = std::uint16_t;
    static constexpr bool exists = true;
    static constexpr int mantissa_bits = 7;
    static constexpr int bias = 127;
    static constexpr word highest = 0x7F7F;
    static constexpr word overflow = 0x7F80;
    static constexpr word quiet_nan = 0x7FC0;
    static constexpr bool has_infinity = true;
    static constexpr bool keeps_payload = false;
};

template <>
struct float_format<float8_e4m3fn_bits> {
    using word = std::uint8_t;
    static constexpr bool exists = true;
    static constexpr int mantissa_bits = 3;
    static constexpr int bias = 7;
    static constexpr word highest = 0x7E;
    static constexpr word overflow = 0x7F;
    static constexpr word quiet_nan = 0x7F;
    static constexpr bool has_infinity = false;
    static constexpr bool keeps_payload = false;
};

template <>
struct float_format<float8_e5m2_bits> {
    using word = std::uint8_t;
    static constexpr bool exists = true;
    static constexpr int mantissa_bits = 2;
    static constexpr int bias = 15;
    static constexpr word highest = 0x7B;
    static constexpr word overflow = 0x7C;
    static constexpr word quiet_nan = 0x7E;
    static constexpr bool has_infinity = true;
    static constexpr bool keeps_payload = false;
};

template <>
struct float_format<float> {
    using word = std::uint32_t;
    static constexpr bool exists = true;
    static constexpr int mantissa_bits = 23;
    static constexpr int bias = 127;
    static constexpr word overflow = 0x7F800000;
    static constexpr word quiet_nan = 0x7FC00000;
};

template <>
struct float_format<double> {
    using word = std::uint64_t;
    static constexpr bool exists = true;
    static constexpr int mantissa_bits = 52;
    static constexpr int bias = 1023;
    static constexpr word overflow = 0x7FF0000000000000;
    static constexpr word quiet_nan = 0x7FF8000000000000;
};

/// The mantissa bits of a NaN below the highest one, which is the quiet bit.
template <typename Float>
inline constexpr auto payload_bits = static_cast<typename float_format<Float>::word>(
    float_format<Float>::quiet_nan - float_format<Float>::overflow - 1);
template <typename T>
inline constexpr bool is_small_float = float_format<T>::exists && !std::is_floating_point_v<T>;
template <typename T>
inline constexpr int size_bits = static_cast<int>(sizeof(T)) * 8;
/// Bits of an integer's value, without the sign.
template <typename Integer>
inline constexpr int value_bits = size_bits<Integer> - (std::is_signed_v<Integer> ? 1 : 0);
template <typename Integer>
inline constexpr Integer highest_integer =
    static_cast<Integer>(~std::uint64_t{0} >> (64 - value_bits<Integer>));
template <typename Integer>
inline constexpr Integer lowest_integer =
    std::is_signed_v<Integer> ? static_cast<Integer>(-highest_integer<Integer> - 1) : Integer{0};

/// std::bit_cast, which device code cannot call.
template <typename To, typename From>
PINFLOW_DETAIL_HOST_DEVICE inline To bits_as(From value) noexcept {
    static_assert(sizeof(To) == sizeof(From), "the same bits for another type of the same size");
    To result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
}

// Conversions between floats select by masks, not by conditions. Compilers do not vectorise a loop that needs
// a float operation on only one side of a condition, and baseline x86 has no vector comparison of 64-bit
// integers.

/// 1 if a < b, otherwise 0. Both must be less than half of the word's range.
template <typename Word>
PINFLOW_DETAIL_HOST_DEVICE inline Word less(Word a, Word b) noexcept {
    return (a - b) >> (size_bits<Word> - 1);
}

/// `a` if `condition` is 1, `b` if it is 0.
template <typename Word>
PINFLOW_DETAIL_HOST_DEVICE inline Word select(Word condition, Word a, Word b) noexcept {
    return b ^ ((a ^ b) & (Word{0} - condition));
}

// ---- floats to floats ---------------------------------------------------------------------------

/// A float or double as a small float.
template <typename To, typename From>
PINFLOW_DETAIL_HOST_DEVICE inline To narrow_float(From value) noexcept {
    using from = float_format<From>;
    using to = float_format<To>;
    using word = typename from::word;
    constexpr int dropped_bits = from::mantissa_bits - to::mantissa_bits;
    constexpr word rebias = static_cast<word>(from::bias - to::bias) << from::mantissa_bits;

    const word bits = bits_as<word>(value);
    const word magnitude = bits & (~word{0} >> 1);
    const word sign = (bits ^ magnitude) >> (size_bits<From> - size_bits<To>);

    const word last_kept_bit = magnitude >> dropped_bits & 1;
    word result =
        (magnitude - rebias + ((word{1} << (dropped_bits - 1)) - 1) + last_kept_bit) >> dropped_bits;
    if constexpr (rebias != 0) {  // otherwise subnormal numbers of both have the same exponent
        // The last bit of `base` has the value of the last bit of a subnormal result, so adding `base` rounds
        // there.
        constexpr word base =
            static_cast<word>(1 - to::bias - to::mantissa_bits + from::mantissa_bits + from::bias)
            << from::mantissa_bits;
        constexpr word first_normal = static_cast<word>(1 - to::bias + from::bias) << from::mantissa_bits;
        const word subnormal = bits_as<word>(bits_as<From>(magnitude) + bits_as<From>(base)) - base;
        result = select(less(magnitude, first_normal), subnormal, result);
    }
    result = select<word>(less<word>(to::highest, result), to::overflow, result);
    word nan = to::quiet_nan;
    if constexpr (to::keeps_payload) nan |= magnitude >> dropped_bits & payload_bits<To>;
    result = select(less(from::overflow, magnitude), nan, result);
    return {static_cast<typename to::word>(sign | result)};
}

/// A small float as a float, which is exact.
template <typename From>
PINFLOW_DETAIL_HOST_DEVICE inline float widen_float(From value) noexcept {
    using from = float_format<From>;
    using to = float_format<float>;
    using word = std::uint32_t;
    constexpr int added_bits = to::mantissa_bits - from::mantissa_bits;
    constexpr word rebias = static_cast<word>(to::bias - from::bias) << to::mantissa_bits;
    constexpr word sign_bit = word{1} << (size_bits<From> - 1);

    const word bits = value.bits;
    const word magnitude = bits & (sign_bit - 1);
    const word sign = (bits ^ magnitude) << (32 - size_bits<From>);

    word result = (magnitude << added_bits) + rebias;
    if constexpr (rebias != 0) {  // otherwise subnormal numbers stay subnormal
        constexpr word last_bit = static_cast<word>(1 - from::bias - from::mantissa_bits + to::bias)
                                  << to::mantissa_bits;
        const float subnormal =
            static_cast<float>(static_cast<std::int32_t>(magnitude)) * bits_as<float>(last_bit);
        result = select(less(magnitude, word{1} << from::mantissa_bits), bits_as<word>(subnormal), result);
    }
    if constexpr (from::has_infinity && rebias != 0) {
        result = select(less<word>(from::highest, magnitude), to::overflow, result);
    }
    constexpr word last_number = from::has_infinity ? from::overflow : from::highest;
    word nan = to::quiet_nan;
    if constexpr (sizeof(From) > 1) nan |= magnitude << added_bits & payload_bits<float>;
    return bits_as<float>(sign | select(less(last_number, magnitude), nan, result));
}

/// Converts a float to a double, or a double to a float. The hardware converts all but NaNs, for which
/// processors differ.
template <typename To, typename From>
PINFLOW_DETAIL_HOST_DEVICE inline To resize_float(From value) noexcept {
    using from = float_format<From>;
    using to = float_format<To>;
    using from_word = typename from::word;
    using to_word = typename to::word;
    constexpr int added_bits = to::mantissa_bits - from::mantissa_bits;
    const from_word bits = bits_as<from_word>(value);
    const from_word magnitude = bits & (~from_word{0} >> 1);
    to_word nan = 0;
    if constexpr (added_bits > 0) {
        nan = static_cast<to_word>(magnitude) << added_bits;
    } else {
        nan = static_cast<to_word>(magnitude >> -added_bits);
    }
    nan = (nan & payload_bits<To>) | to::quiet_nan;
    nan |= static_cast<to_word>(bits >> (size_bits<From> - 1)) << (size_bits<To> - 1);
    return bits_as<To>(select(static_cast<to_word>(less(from::overflow, magnitude)), nan,
                              bits_as<to_word>(static_cast<To>(value))));
}

// ---- integers -----------------------------------------------------------------------------------

/// Converts a float or double to an integer: truncates toward zero and saturates; NaN becomes 0.
template <typename To, typename From>
PINFLOW_DETAIL_HOST_DEVICE inline To truncate_float(From value) noexcept {
    constexpr From above = 2 * static_cast<From>(std::uint64_t{1} << (value_bits<To> - 1));
    constexpr From lowest = std::is_signed_v<To> ? -above : From{0};
    const From inside = value > lowest && value < above ? value : From{0};
    const To truncated = static_cast<To>(inside);
    return value >= above ? highest_integer<To> : value <= lowest ? lowest_integer<To> : truncated;
}

template <typename To, typename From>
PINFLOW_DETAIL_HOST_DEVICE inline To saturate_integer(From value) noexcept {
    if constexpr (std::is_signed_v<From> && value_bits<To> < value_bits<From>) {
        if (value < static_cast<From>(lowest_integer<To>)) return lowest_integer<To>;
    } else if constexpr (std::is_signed_v<From> && !std::is_signed_v<To>) {
        if (value < 0) return 0;
    }
    if constexpr (value_bits<To> < value_bits<From>) {
        if (value > static_cast<From>(highest_integer<To>)) return highest_integer<To>;
    }
    return static_cast<To>(value);
}

/// Converts an integer to a float or double that rounds to the same small float. An integer beyond 2^53 that
/// is no multiple of 4096 is rounded to the neighbouring odd multiple of 4096 (round to odd). There, all
/// numbers of the small floats, and the midpoints between them, are even multiples of 4096, so this never
/// moves an integer onto or past one of them.
template <typename Integer>
PINFLOW_DETAIL_HOST_DEVICE inline auto float_for_rounding(Integer value) noexcept {
    if constexpr (sizeof(Integer) <= 2) {
        return static_cast<float>(value);
    } else if constexpr (sizeof(Integer) == 4) {
        return static_cast<double>(value);
    } else {
        constexpr Integer exact = Integer{1} << 53;
        bool fits = value <= exact;
        if constexpr (std::is_signed_v<Integer>) fits = fits && value >= -exact;
        constexpr Integer low_bits = 4095;
        const Integer sticky = (value & low_bits) != 0 ? low_bits + 1 : 0;
        return static_cast<double>(fits ? value : ((value & ~low_bits) | sticky));
    }
}

// ---- every number to every other ----------------------------------------------------------------

template <typename>
inline constexpr bool is_complex = false;
template <typename Part>
inline constexpr bool is_complex<complex_parts<Part>> = true;

/// Casts `value` to `To`. Both are bool, an integer, float, double or a small float, or both are
/// complex_parts. The byte of a boolean in an array may have any value, and all but 0 are true: compare it
/// with 0, do not load it as a C++ bool.
template <typename To, typename From>
PINFLOW_DETAIL_HOST_DEVICE inline To cast_scalar(From value) noexcept {
    static_assert(is_complex<To> == is_complex<From>, "complex numbers are cast to complex numbers only");
    if constexpr (std::is_same_v<To, From>) {
        return value;
    } else if constexpr (is_complex<To>) {
        using part = decltype(To::real);
        return {cast_scalar<part>(value.real), cast_scalar<part>(value.imaginary)};
    } else if constexpr (is_small_float<From>) {
        return cast_scalar<To>(widen_float(value));
    } else if constexpr (std::is_same_v<To, bool>) {
        return value != 0;
    } else if constexpr (std::is_same_v<From, bool>) {
        return cast_scalar<To>(static_cast<std::uint8_t>(value));
    } else if constexpr (std::is_integral_v<From>) {
        if constexpr (std::is_integral_v<To>) {
            return saturate_integer<To>(value);
        } else if constexpr (is_small_float<To>) {
            return narrow_float<To>(float_for_rounding(value));
        } else {
            return static_cast<To>(value);
        }
    } else if constexpr (std::is_integral_v<To>) {
        return truncate_float<To>(value);
    } else if constexpr (is_small_float<To>) {
        return narrow_float<To>(value);
    } else {
        return resize_float<To>(value);
    }
}

// ---- byte order ---------------------------------------------------------------------------------

PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint16_t byte_swap(std::uint16_t word) noexcept {
    return static_cast<std::uint16_t>(word << 8 | word >> 8);
}

PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint32_t byte_swap(std::uint32_t word) noexcept {
    return word << 24 | (word & 0xFF00) << 8 | (word >> 8 & 0xFF00) | word >> 24;
}

PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint64_t byte_swap(std::uint64_t word) noexcept {
    return static_cast<std::uint64_t>(byte_swap(static_cast<std::uint32_t>(word))) << 32 |
           byte_swap(static_cast<std::uint32_t>(word >> 32));
}

PINFLOW_DETAIL_HOST_DEVICE constexpr word_pair byte_swap(word_pair words) noexcept {
    return {byte_swap(words.second), byte_swap(words.first)};
}

}  // namespace pinflow::detail

#undef PINFLOW_DETAIL_HOST_DEVICE
