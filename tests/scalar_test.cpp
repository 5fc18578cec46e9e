// Conversions to small floats are compared with an oracle that does no rounding of bits: a table with the
// values of all codes of a small float, computed from the definition, and a search for the nearest.
#include "src/core/scalar.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

using namespace pinflow::detail;

namespace {

using wide = long double;
static_assert(LDBL_MANT_DIG >= 64, "the oracle needs long doubles that hold any 64-bit integer and midpoint");
__extension__ using int128 = __int128;

constexpr double infinity = std::numeric_limits<double>::infinity();

/// All non-negative codes of a small float, and what they mean.
template <typename Small>
class code_table {
 public:
    /// From the definition: fields of the given sizes, exponent 0 for subnormals. `first_special` is the
    /// first code that is not a finite number.
    code_table(int exponent_bits, int mantissa_bits, unsigned first_special) : first_special_(first_special) {
        const int bias = (1 << (exponent_bits - 1)) - 1;
        for (unsigned code = 0; code <= first_special; ++code) {
            const int exponent = static_cast<int>(code >> mantissa_bits);
            const auto mantissa = static_cast<wide>(code & ((1u << mantissa_bits) - 1));
            const wide one = std::ldexp(wide{1}, mantissa_bits);
            const wide significand = exponent == 0 ? mantissa : one + mantissa;
            values_.push_back(std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits));
        }
    }

    /// The number of a finite code; for the first code that is not finite, the number that would follow.
    wide value(unsigned code) const { return values_[code]; }
    unsigned first_special() const { return first_special_; }

    /// The code of the number nearest to a non-negative one. If two are equally near, the even code.
    unsigned nearest(wide magnitude) const {
        const auto above = std::ranges::lower_bound(values_, magnitude);
        if (above == values_.end()) return first_special_;
        const auto code = static_cast<unsigned>(above - values_.begin());
        if (*above == magnitude) return code;
        const wide middle = (values_[code - 1] + values_[code]) / 2;
        if (magnitude == middle) return code % 2 == 0 ? code : code - 1;
        return magnitude < middle ? code - 1 : code;
    }

    /// The code of any number or infinity, not of a NaN.
    template <typename Number>
    unsigned expected(Number number) const {
        const wide exact = static_cast<wide>(number);
        const unsigned sign = std::signbit(exact) ? 1u << (size_bits<Small> - 1) : 0;
        return sign | nearest(std::abs(exact));
    }

 private:
    unsigned first_special_;
    std::vector<wide> values_;
};

template <typename Small>
const code_table<Small>& table();
template <>
const code_table<half_bits>& table() {
    static const code_table<half_bits> codes(5, 10, 0x7C00);
    return codes;
}
template <>
const code_table<bfloat16_bits>& table() {
    static const code_table<bfloat16_bits> codes(8, 7, 0x7F80);
    return codes;
}
template <>
const code_table<float8_e4m3fn_bits>& table() {
    static const code_table<float8_e4m3fn_bits> codes(4, 3, 0x7F);  // which is its only NaN
    return codes;
}
template <>
const code_table<float8_e5m2_bits>& table() {
    static const code_table<float8_e5m2_bits> codes(5, 2, 0x7C);
    return codes;
}

template <typename Small>
Small from_code(unsigned code) {
    return {static_cast<decltype(Small::bits)>(code)};
}

template <typename To, typename From>
unsigned code_of(From value) {
    return cast_scalar<To>(value).bits;
}

/// Runs `body(Type{})` for each type.
template <typename... Types, typename Body>
void for_each_type(Body body) {
    (body(Types{}), ...);
}

template <typename Body>
void for_each_small(Body body) {
    for_each_type<half_bits, bfloat16_bits, float8_e4m3fn_bits, float8_e5m2_bits>(body);
}

template <typename Body>
void for_each_integer(Body body) {
    for_each_type<std::int8_t, std::int16_t, std::int32_t, std::int64_t, std::uint8_t, std::uint16_t,
                  std::uint32_t, std::uint64_t>(body);
}

/// Fails with the first number only: millions are tried.
template <typename Small, typename Number>
void check_rounding(Number number, unsigned& wrong) {
    const unsigned code = code_of<Small>(number);
    const unsigned expected = table<Small>().expected(number);
    if (code == expected || wrong++ > 0) return;
    FAIL_CHECK("of size " << sizeof(Small) << ": " << static_cast<double>(number) << " gives code " << code
                          << ", its nearest is " << expected);
}

template <typename Float>
std::vector<Float> with_neighbours(Float number) {
    constexpr Float end = std::numeric_limits<Float>::infinity();
    return {number, std::nextafter(number, end), std::nextafter(number, -end)};
}

template <typename Integer>
std::vector<Integer> interesting_integers() {
    std::vector<Integer> result;
    std::mt19937_64 random(3);
    for (int bit = 0; bit < 64; ++bit) {
        for (const std::uint64_t near : {~std::uint64_t{0}, std::uint64_t{0}, std::uint64_t{1}}) {
            const std::uint64_t value = (std::uint64_t{1} << bit) + near;
            result.push_back(static_cast<Integer>(value));
            result.push_back(static_cast<Integer>(0 - value));
        }
        for (int i = 0; i < 50; ++i) {
            const std::uint64_t value = random() >> bit;
            result.push_back(static_cast<Integer>(value));
            result.push_back(static_cast<Integer>(0 - value));
        }
    }
    return result;
}

/// By definition: the number without its fraction, clamped to the limits of `Integer`; 0 for a NaN.
template <typename Integer>
Integer truncated_by_definition(wide number) {
    if (std::isnan(number)) return 0;
    const wide whole = std::trunc(number);
    if (whole <= static_cast<wide>(std::numeric_limits<Integer>::min()))
        return std::numeric_limits<Integer>::min();
    if (whole >= static_cast<wide>(std::numeric_limits<Integer>::max()))
        return std::numeric_limits<Integer>::max();
    return static_cast<Integer>(whole);
}

}  // namespace

// ---- small floats to others -----------------------------------------------------------------------

TEST_CASE("scalar: every code of a small float is widened to the number it means, and comes back") {
    for_each_small([]<typename Small>(Small) {
        constexpr unsigned sign = 1u << (size_bits<Small> - 1);
        for (unsigned code = 0; code < sign; ++code) {
            CAPTURE(sizeof(Small));
            CAPTURE(code);
            const auto positive = cast_scalar<float>(from_code<Small>(code));
            const auto negative = cast_scalar<float>(from_code<Small>(sign | code));
            REQUIRE(std::bit_cast<std::uint32_t>(negative) ==
                    (std::bit_cast<std::uint32_t>(positive) | 0x8000'0000));
            REQUIRE_FALSE(std::signbit(positive));
            const auto as_double = cast_scalar<double>(from_code<Small>(code));
            constexpr bool has_infinity = !std::is_same_v<Small, float8_e4m3fn_bits>;
            const unsigned first_special = table<Small>().first_special();
            if (code < first_special) {
                REQUIRE(static_cast<wide>(positive) == table<Small>().value(code));
                REQUIRE(static_cast<wide>(as_double) == table<Small>().value(code));
            } else if (has_infinity && code == first_special) {
                REQUIRE(positive == static_cast<float>(infinity));
                REQUIRE(as_double == infinity);
            } else {
                REQUIRE(std::isnan(positive));
                REQUIRE((std::bit_cast<std::uint32_t>(positive) & 0x0040'0000) != 0);  // quiet
                REQUIRE(std::isnan(as_double));
                REQUIRE(code_of<Small>(positive) >= first_special + (has_infinity ? 1 : 0));
                REQUIRE(code_of<Small>(as_double) == code_of<Small>(positive));
                continue;
            }
            REQUIRE(code_of<Small>(positive) == code);
            REQUIRE(code_of<Small>(negative) == (sign | code));
            REQUIRE(code_of<Small>(as_double) == code);
        }
    });
}

TEST_CASE("scalar: a small float is converted to another small float by its number") {
    for_each_small([]<typename From>(From) {
        for_each_small([]<typename To>(To) {
            if constexpr (!std::is_same_v<From, To>) {
                for (unsigned code = 0; code < 1u << size_bits<From>; ++code) {
                    const auto number = cast_scalar<float>(from_code<From>(code));
                    REQUIRE(code_of<To>(from_code<From>(code)) == code_of<To>(number));
                }
            }
        });
    });
}

// ---- float and double to small floats ---------------------------------------------------------------

TEST_CASE("scalar: numbers at, halfway between, and next to those of a small float round to nearest even") {
    for_each_small([]<typename Small>(Small) {
        unsigned wrong = 0;
        const code_table<Small>& codes = table<Small>();
        for (unsigned code = 0; code < codes.first_special(); ++code) {
            const wide middle = (codes.value(code) + codes.value(code + 1)) / 2;
            for (const wide exact : {codes.value(code), middle}) {
                for (const float number : with_neighbours(static_cast<float>(exact))) {
                    check_rounding<Small>(number, wrong);
                    check_rounding<Small>(-number, wrong);
                }
                // rounding to float first would move the neighbours of a midpoint onto it
                for (const double number : with_neighbours(static_cast<double>(exact))) {
                    check_rounding<Small>(number, wrong);
                    check_rounding<Small>(-number, wrong);
                }
            }
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("scalar: a double is rounded once, not twice by way of float") {
    const double just_above_a_midpoint = 1 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40);
    CHECK(code_of<half_bits>(just_above_a_midpoint) == 0x3C01);
    CHECK(code_of<half_bits>(static_cast<float>(just_above_a_midpoint)) == 0x3C00);
    CHECK(code_of<bfloat16_bits>(1 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40)) == 0x3F81);
    CHECK(code_of<float8_e4m3fn_bits>(1 + std::ldexp(1.0, -4) + std::ldexp(1.0, -40)) == 0x39);
    CHECK(code_of<float8_e5m2_bits>(1 + std::ldexp(1.0, -3) + std::ldexp(1.0, -40)) == 0x3D);
}

TEST_CASE("scalar: floats all over their range round to nearest even") {
    constexpr std::uint32_t step = 2003;  // a prime: all exponents, and all last bits
    for_each_small([]<typename Small>(Small) {
        unsigned wrong = 0;
        for (std::uint64_t bits = 0; bits < 0x7F80'0000; bits += step) {
            check_rounding<Small>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)), wrong);
            check_rounding<Small>(std::bit_cast<float>(static_cast<std::uint32_t>(bits | 0x8000'0000)),
                                  wrong);
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("scalar: random doubles round to nearest even") {
    std::mt19937_64 random(5);
    for_each_small([&]<typename Small>(Small) {
        unsigned wrong = 0;
        for (int i = 0; i < 300'000; ++i) {
            const auto anything = std::bit_cast<double>(random());
            if (!std::isnan(anything)) check_rounding<Small>(anything, wrong);
            // within the exponents of the small float, and a little beyond
            const int exponents = std::is_same_v<Small, bfloat16_bits> ? 290 : 60;
            const int exponent =
                static_cast<int>(random() % static_cast<unsigned>(exponents)) - exponents / 2;
            check_rounding<Small>(std::ldexp(static_cast<double>(random() >> 11), exponent - 52), wrong);
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("scalar: numbers too large for a small float become infinity, or NaN if it has no infinity") {
    for (const double number : {1e6, 1e300, infinity}) {
        CHECK(code_of<half_bits>(number) == 0x7C00);
        CHECK(code_of<half_bits>(static_cast<float>(-number)) == 0xFC00);
        CHECK(code_of<float8_e5m2_bits>(number) == 0x7C);
        CHECK(code_of<float8_e5m2_bits>(static_cast<float>(-number)) == 0xFC);
        CHECK(code_of<float8_e4m3fn_bits>(number) == 0x7F);
        CHECK(code_of<float8_e4m3fn_bits>(static_cast<float>(-number)) == 0xFF);
    }
    CHECK(code_of<bfloat16_bits>(1e39) == 0x7F80);
    CHECK(code_of<bfloat16_bits>(std::numeric_limits<float>::max()) == 0x7F80);
    CHECK(code_of<bfloat16_bits>(-infinity) == 0xFF80);
    CHECK(code_of<half_bits>(65519.99F) == 0x7BFF);
    CHECK(code_of<half_bits>(65520.0F) == 0x7C00);
    CHECK(code_of<float8_e4m3fn_bits>(464.0F) == 0x7E);  // halfway to 480: 448 is the even one
    CHECK(code_of<float8_e4m3fn_bits>(std::nextafter(464.0F, 1e9F)) == 0x7F);
    CHECK(code_of<float8_e5m2_bits>(std::nextafter(61440.0F, 0.0F)) == 0x7B);
    CHECK(code_of<float8_e5m2_bits>(61440.0F) == 0x7C);
}

TEST_CASE("scalar: zeros keep their sign") {
    for_each_small([]<typename Small>(Small) {
        constexpr unsigned sign = 1u << (size_bits<Small> - 1);
        CHECK(code_of<Small>(0.0F) == 0);
        CHECK(code_of<Small>(-0.0F) == sign);
        CHECK(code_of<Small>(-0.0) == sign);
        CHECK(code_of<Small>(-1e-300) == sign);
        CHECK(std::signbit(cast_scalar<double>(from_code<Small>(sign))));
    });
    CHECK(std::signbit(cast_scalar<float>(-0.0)));
    CHECK(std::signbit(cast_scalar<double>(-0.0F)));
}

TEST_CASE("scalar: a NaN stays one, becomes quiet, and keeps its sign and the payload that fits") {
    const auto nan = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
    CHECK(code_of<half_bits>(nan(0x7FC0'0000)) == 0x7E00);
    CHECK(code_of<half_bits>(nan(0xFFC0'0000)) == 0xFE00);
    CHECK(code_of<half_bits>(nan(0x7F80'0001)) == 0x7E00);  // signalling, with a payload that does not fit
    CHECK(code_of<half_bits>(nan(0xFFFF'FFFF)) == 0xFFFF);
    CHECK(code_of<half_bits>(nan(0x7FC0'2000)) == 0x7E01);
    CHECK(code_of<bfloat16_bits>(nan(0x7F80'0001)) == 0x7FC0);
    CHECK(code_of<bfloat16_bits>(nan(0xFFFF'FFFF)) == 0xFFC0);
    CHECK(code_of<float8_e4m3fn_bits>(nan(0x7FC0'0000)) == 0x7F);
    CHECK(code_of<float8_e4m3fn_bits>(nan(0xFF80'0001)) == 0xFF);
    CHECK(code_of<float8_e5m2_bits>(nan(0x7F80'0001)) == 0x7E);
    CHECK(code_of<float8_e5m2_bits>(nan(0xFFFF'FFFF)) == 0xFE);
    CHECK(code_of<half_bits>(std::bit_cast<double>(0xFFF0'0000'0000'0001)) == 0xFE00);
    CHECK(code_of<bfloat16_bits>(std::bit_cast<double>(0x7FF0'0000'0000'0001)) == 0x7FC0);

    const auto bits32 = [](auto value) { return std::bit_cast<std::uint32_t>(cast_scalar<float>(value)); };
    const auto bits64 = [](auto value) { return std::bit_cast<std::uint64_t>(cast_scalar<double>(value)); };
    CHECK(bits32(half_bits{0x7C01}) == 0x7FC0'2000);
    CHECK(bits32(half_bits{0xFFFF}) == 0xFFFF'E000);
    CHECK(bits32(bfloat16_bits{0xFF81}) == 0xFFC1'0000);
    CHECK(bits32(float8_e4m3fn_bits{0xFF}) == 0xFFC0'0000);
    CHECK(bits32(float8_e5m2_bits{0x7D}) == 0x7FC0'0000);
    CHECK(bits32(float8_e5m2_bits{0x7F}) == 0x7FC0'0000);
    CHECK(bits64(nan(0xFF80'0001)) == 0xFFF8'0000'2000'0000);
    CHECK(bits64(half_bits{0x7E00}) == 0x7FF8'0000'0000'0000);
    CHECK(bits32(std::bit_cast<double>(0xFFF0'0000'0000'0001)) == 0xFFC0'0000);
    CHECK(bits32(std::bit_cast<double>(0x7FF0'0000'2000'0000)) == 0x7FC0'0001);
    // the same type: not touched
    CHECK(bits32(std::bit_cast<float>(0x7F80'0001)) == 0x7F80'0001);
    CHECK(code_of<half_bits>(half_bits{0x7C01}) == 0x7C01);
}

#ifdef __FLT16_MANT_DIG__
TEST_CASE("scalar: half floats equal the compiler's") {
    __extension__ using half = _Float16;
    unsigned wrong = 0;
    for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 1009) {
        const auto number = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        if (std::isnan(number)) continue;
        wrong += std::bit_cast<std::uint16_t>(static_cast<half>(number)) != code_of<half_bits>(number);
    }
    std::mt19937_64 random(11);
    for (int i = 0; i < 1'000'000; ++i) {
        const double number =
            std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 60) - 52 - 35);
        wrong += std::bit_cast<std::uint16_t>(static_cast<half>(number)) != code_of<half_bits>(number);
    }
    CHECK(wrong == 0);
}
#endif

TEST_CASE("scalar: float and double become each other as the hardware says, rounded to nearest even") {
    std::mt19937_64 random(13);
    for (int i = 0; i < 300'000; ++i) {
        const auto single = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        if (!std::isnan(single)) {
            REQUIRE(cast_scalar<double>(single) == static_cast<double>(single));
            REQUIRE(cast_scalar<float>(cast_scalar<double>(single)) == single);
            if (std::isinf(single)) continue;
            // halfway to the next number towards 0
            const float next = std::nextafter(single, 0.0F);
            const double middle = (static_cast<double>(single) + static_cast<double>(next)) / 2;
            const bool even = std::bit_cast<std::uint32_t>(single) % 2 == 0;
            REQUIRE(cast_scalar<float>(middle) == (even ? single : next));
            REQUIRE(cast_scalar<float>(std::nextafter(middle, 0.0)) == next);
        }
    }
    CHECK(cast_scalar<float>(1e300) == static_cast<float>(infinity));
    CHECK(cast_scalar<float>(-infinity) == static_cast<float>(-infinity));
    CHECK(cast_scalar<float>(1e-46) == 0.0F);
    CHECK(cast_scalar<float>(1e-45) == std::numeric_limits<float>::denorm_min());
}

// ---- integers -----------------------------------------------------------------------------------------

TEST_CASE("scalar: integers become floats, rounded once to nearest even") {
    for_each_integer([]<typename Integer>(Integer) {
        for (const Integer integer : interesting_integers<Integer>()) {
            // long double holds it exactly, so that one rounding follows
            REQUIRE(cast_scalar<float>(integer) == static_cast<float>(static_cast<wide>(integer)));
            REQUIRE(cast_scalar<double>(integer) == static_cast<double>(static_cast<wide>(integer)));
        }
        for_each_small([]<typename Small>(Small) {
            unsigned wrong = 0;
            for (const Integer integer : interesting_integers<Integer>()) {
                check_rounding<Small>(integer, wrong);
            }
            const code_table<Small>& codes = table<Small>();
            for (unsigned code = 0; code < codes.first_special(); ++code) {
                const wide middle = (codes.value(code) + codes.value(code + 1)) / 2;
                for (const wide distance : {-1.0L, 0.0L, 1.0L}) {
                    const wide number = middle + distance;
                    for (const wide exact : {number, -number}) {
                        const auto integer = truncated_by_definition<Integer>(exact);
                        if (static_cast<wide>(integer) == exact) check_rounding<Small>(integer, wrong);
                    }
                }
            }
            CHECK(wrong == 0);
        });
    });
    // one above a midpoint of bfloat16, which a double would round to the midpoint
    CHECK(code_of<bfloat16_bits>((std::int64_t{0x101} << 54) + 1) == 0x5E81);
    CHECK(code_of<bfloat16_bits>((std::int64_t{0x101} << 54) * -1 - 1) == 0xDE81);
    CHECK(code_of<bfloat16_bits>((std::uint64_t{0x101} << 55) + 1) == 0x5F01);
    CHECK(code_of<bfloat16_bits>(std::int64_t{0x101} << 54) == 0x5E80);
}

TEST_CASE("scalar: floats become integers without their fraction, within the limits, and NaN becomes 0") {
    for_each_integer([]<typename Integer>(Integer) {
        for_each_type<float, double>([]<typename Float>(Float) {
            std::vector<Float> numbers{std::numeric_limits<Float>::quiet_NaN(), static_cast<Float>(infinity)};
            for (int exponent = -3; exponent < 70; ++exponent) {
                for (const Float part : {1.0F, 1.25F, 1.5F, 1.9375F}) {
                    for (const Float number : with_neighbours(std::ldexp(part, exponent))) {
                        numbers.push_back(number);
                        for (const Float aside : {0.5F, 1.0F, 1.5F}) {
                            numbers.push_back(number - aside);
                            numbers.push_back(number + aside);
                        }
                    }
                }
            }
            numbers.push_back(std::numeric_limits<Float>::max());
            numbers.push_back(std::numeric_limits<Float>::denorm_min());
            for (const Float number : numbers) {
                CAPTURE(number);
                REQUIRE(cast_scalar<Integer>(number) == truncated_by_definition<Integer>(number));
                REQUIRE(cast_scalar<Integer>(-number) == truncated_by_definition<Integer>(-number));
            }
        });
        for_each_small([]<typename Small>(Small) {
            for (unsigned code = 0; code < 1u << size_bits<Small>; ++code) {
                const auto small = from_code<Small>(code);
                REQUIRE(cast_scalar<Integer>(small) ==
                        truncated_by_definition<Integer>(cast_scalar<float>(small)));
            }
        });
    });
    CHECK(cast_scalar<std::uint8_t>(-0.9) == 0);
    CHECK(cast_scalar<std::uint8_t>(255.9) == 255);
    CHECK(cast_scalar<std::int8_t>(-128.9) == -128);
}

TEST_CASE("scalar: integers become integers within the limits") {
    for_each_integer([]<typename From>(From) {
        for_each_integer([]<typename To>(To) {
            for (const From integer : interesting_integers<From>()) {
                const auto expected = std::clamp<int128>(integer, std::numeric_limits<To>::min(),
                                                         std::numeric_limits<To>::max());
                REQUIRE(static_cast<int128>(cast_scalar<To>(integer)) == expected);
            }
        });
    });
    CHECK(cast_scalar<std::uint8_t>(std::int64_t{-1}) == 0);
    CHECK(cast_scalar<std::int64_t>(~std::uint64_t{0}) == std::numeric_limits<std::int64_t>::max());
    CHECK(cast_scalar<std::int8_t>(std::uint8_t{200}) == 127);
}

// ---- booleans, complex numbers, byte order ------------------------------------------------------------

TEST_CASE("scalar: a number becomes true if it is not zero, and a boolean becomes 0 or 1") {
    for_each_integer([]<typename Integer>(Integer) {
        CHECK_FALSE(cast_scalar<bool>(Integer{0}));
        for (int bit = 0; bit < size_bits<Integer>; ++bit) {
            CHECK(cast_scalar<bool>(static_cast<Integer>(Integer{1} << bit)));
        }
        CHECK(cast_scalar<Integer>(true) == 1);
        CHECK(cast_scalar<Integer>(false) == 0);
    });
    for_each_small([]<typename Small>(Small) {
        constexpr unsigned sign = 1u << (size_bits<Small> - 1);
        for (unsigned code = 0; code < 2 * sign; ++code) {
            REQUIRE(cast_scalar<bool>(from_code<Small>(code)) == (code != 0 && code != sign));
        }
        CHECK(code_of<Small>(true) == code_of<Small>(1.0F));
        CHECK(code_of<Small>(false) == 0);
    });
    CHECK_FALSE(cast_scalar<bool>(-0.0F));
    CHECK(cast_scalar<bool>(std::numeric_limits<float>::denorm_min()));
    CHECK(cast_scalar<bool>(std::numeric_limits<double>::quiet_NaN()));
    CHECK(cast_scalar<bool>(-infinity));
    CHECK(cast_scalar<double>(true) == 1.0);
}

TEST_CASE("scalar: a complex number is cast part by part") {
    const auto narrow = cast_scalar<complex_parts<float>>(complex_parts<double>{0.1, -infinity});
    CHECK(narrow.real == 0.1F);
    CHECK(narrow.imaginary == static_cast<float>(-infinity));
    const auto widened = cast_scalar<complex_parts<double>>(complex_parts<float>{0.1F, -0.0F});
    CHECK(widened.real == static_cast<double>(0.1F));
    CHECK(std::signbit(widened.imaginary));
}

TEST_CASE("scalar: bytes are swapped in words of 2, 4, 8 and 16 bytes") {
    CHECK(byte_swap(std::uint16_t{0x0123}) == 0x2301);
    CHECK(byte_swap(std::uint32_t{0x01234567}) == 0x67452301);
    CHECK(byte_swap(std::uint64_t{0x0123456789ABCDEF}) == 0xEFCDAB8967452301);
    const word_pair swapped = byte_swap(word_pair{0x0123456789ABCDEF, 0xFEDCBA9876543210});
    CHECK(swapped.first == 0x1032547698BADCFE);
    CHECK(swapped.second == 0xEFCDAB8967452301);
}
