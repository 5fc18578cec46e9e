#include "src/core/cast.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/scalar.hpp"
#include "tests/support/file_bytes.hpp"

using namespace pinflow::detail;
using pinflow::dtype;
using pinflow::dtype_kind;

namespace {

template <typename T>
dtype type_of() {
    if constexpr (std::is_same_v<T, half_bits>) {
        return {dtype_kind::floating, 2};
    } else if constexpr (std::is_same_v<T, bfloat16_bits>) {
        return {dtype_kind::bfloat16, 2};
    } else if constexpr (std::is_same_v<T, float8_e4m3fn_bits>) {
        return {dtype_kind::float8_e4m3fn, 1};
    } else if constexpr (std::is_same_v<T, float8_e5m2_bits>) {
        return {dtype_kind::float8_e5m2, 1};
    } else {
        return dtype::of<T>();
    }
}

/// Runs `body.operator()<T>()` for every type of a real number.
template <typename Body>
void for_each_real(Body body) {
    const auto each = [&]<typename... Types>() { (body.template operator()<Types>(), ...); };
    each.template operator()<bool, std::int8_t, std::int16_t, std::int32_t, std::int64_t, std::uint8_t,
                             std::uint16_t, std::uint32_t, std::uint64_t, half_bits, float, double,
                             bfloat16_bits, float8_e4m3fn_bits, float8_e5m2_bits>();
}

/// Numbers of that type in memory: all codes of short types, otherwise random bits and special values.
template <typename T>
std::vector<std::byte> numbers_of() {
    std::vector<std::byte> bytes;
    const auto add = [&](auto value) {
        const auto raw = std::bit_cast<std::array<std::byte, sizeof value>>(value);
        bytes.insert(bytes.end(), raw.begin(), raw.end());
    };
    if constexpr (sizeof(T) <= 2) {
        for (unsigned code = 0; code < 1u << size_bits<T>; ++code) {
            if constexpr (sizeof(T) == 1) {
                add(static_cast<std::uint8_t>(code));
            } else {
                add(static_cast<std::uint16_t>(code));
            }
        }
    } else {
        std::mt19937_64 random(sizeof(T));
        for (int i = 0; i < 3000; ++i) {
            const std::uint64_t bits = random() >> (i % (size_bits<T>)) >> (64 - size_bits<T>);
            if constexpr (sizeof(T) == 4) {
                add(static_cast<std::uint32_t>(bits));
            } else {
                add(bits);
            }
            if constexpr (std::is_floating_point_v<T>) add(static_cast<T>(bits) / 1000);
        }
        add(std::numeric_limits<T>::max());
        add(std::numeric_limits<T>::lowest());
        if constexpr (std::is_floating_point_v<T>) {
            for (const double number : {0.0, -0.0, HUGE_VAL, -HUGE_VAL, 448.0, 464.0, 65519.0, 65520.0, 1e-7})
                add(static_cast<T>(number));
            add(std::numeric_limits<T>::quiet_NaN());
            add(std::numeric_limits<T>::denorm_min());
        }
    }
    return bytes;
}

template <typename T>
T number_at(const std::byte* bytes) {
    if constexpr (std::is_same_v<T, bool>) {
        return *bytes != std::byte{0};
    } else {
        T value;
        std::memcpy(&value, bytes, sizeof value);
        return value;
    }
}

/// Casts from unaligned to unaligned memory, and checks that no other bytes are written.
std::vector<std::byte> cast(const dtype& from, const std::vector<std::byte>& source, const dtype& to) {
    constexpr std::byte untouched{0xA5};
    const std::uint64_t count = source.size() / from.size_bytes();
    const std::uint64_t size = count * to.size_bytes();
    std::vector<std::byte> misaligned(source.size() + 1);
    std::ranges::copy(source, misaligned.begin() + 1);
    std::vector<std::byte> result(size + 2, untouched);
    cast_elements(from, misaligned.data() + 1, to, result.data() + 1, count);
    CHECK(result.front() == untouched);
    CHECK(result.back() == untouched);
    return {result.begin() + 1, result.end() - 1};
}

}  // namespace

TEST_CASE("cast: elements of every type of number become those of every other, as scalars do") {
    for_each_real([]<typename From>() {
        const dtype from = type_of<From>();
        const std::vector<std::byte> source = numbers_of<From>();
        for_each_real([&]<typename To>() {
            const dtype to = type_of<To>();
            CAPTURE(from.descr());
            CAPTURE(to.descr());
            REQUIRE(can_cast(from, to));
            const std::vector<std::byte> result = cast(from, source, to);
            if constexpr (std::is_same_v<From, To>) {
                CHECK(result == source);  // also bytes that are not valid booleans
            } else {
                using raw = std::array<std::byte, sizeof(To)>;
                std::size_t wrong = 0;
                for (std::size_t i = 0; i < source.size() / sizeof(From); ++i) {
                    const To expected = cast_scalar<To>(number_at<From>(source.data() + i * sizeof(From)));
                    wrong += std::bit_cast<raw>(expected) != number_at<raw>(result.data() + i * sizeof(To));
                }
                CHECK(wrong == 0);
            }
        });
    });
}

TEST_CASE("cast: takes any number of elements, including none") {
    const dtype single = dtype::of<float>();
    const dtype half(dtype_kind::floating, 2);
    const std::vector<std::byte> source = numbers_of<float>();
    for (std::size_t count = 0; count < 70; ++count) {
        const auto end = source.begin() + static_cast<std::ptrdiff_t>(count * sizeof(float));
        const std::vector<std::byte> result = cast(single, {source.begin(), end}, half);
        for (std::size_t i = 0; i < count; ++i) {
            REQUIRE(number_at<half_bits>(result.data() + 2 * i).bits ==
                    cast_scalar<half_bits>(number_at<float>(source.data() + 4 * i)).bits);
        }
    }
    cast_elements(single, nullptr, half, nullptr, 0);
    cast_elements(single, nullptr, single, nullptr, 0);
}

TEST_CASE("cast: complex numbers become complex numbers of the other size") {
    const dtype complex64(dtype_kind::complex, 8);
    const dtype complex128(dtype_kind::complex, 16);
    const std::vector<std::byte> doubles = numbers_of<double>();
    const std::vector<std::byte> floats = numbers_of<float>();
    const auto whole = [](std::vector<std::byte> bytes, std::size_t size) {
        bytes.resize(bytes.size() / size * size);
        return bytes;
    };
    CHECK(cast(complex128, whole(doubles, 16), complex64) ==
          cast(dtype::of<double>(), whole(doubles, 16), dtype::of<float>()));
    CHECK(cast(complex64, whole(floats, 8), complex128) ==
          cast(dtype::of<float>(), whole(floats, 8), dtype::of<double>()));
}

TEST_CASE("cast: any type becomes itself, byte for byte") {
    const std::vector<std::byte> bytes = numbers_of<std::uint16_t>();
    for (const std::string_view descr :
         {"<f16", "<c32", "<c16", ">f4", "|S5", "<U3", ">U3", "|V7", "<M8[ns]", "<m8", "|b1", "<f2"}) {
        CAPTURE(descr);
        const dtype type = dtype::parse(descr);
        CHECK(can_cast(type, type));
        const std::vector<std::byte> whole(
            bytes.begin(), bytes.end() - static_cast<std::ptrdiff_t>(bytes.size() % type.size_bytes()));
        CHECK(cast(type, whole, type) == whole);
    }
    const dtype record = dtype::structured(
        {{.name = "a", .title = "", .type = dtype::of<float>(), .shape = {}},
         {.name = "b", .title = "", .type = dtype::of<std::int16_t>(), .shape = {2}, .offset_bytes = 4}},
        8);
    CHECK(can_cast(record, record));
    CHECK(cast(record, bytes, record) == bytes);
    CHECK_FALSE(can_cast(record, dtype::of<std::int64_t>()));
    CHECK_FALSE(can_cast(dtype::of<std::int64_t>(), record));
}

TEST_CASE("cast: types that are not numbers, not little-endian or too long are refused") {
    for (const std::string_view descr :
         {"<f16", "<c32", ">f4", ">i2", ">c8", "|S4", "<U1", "|V4", "<M8[ns]", "<m8[s]"}) {
        const dtype other = dtype::parse(descr);
        for (const std::string_view number : {"<f4", "<f8", "|b1", "<i8", "<c8", "<c16"}) {
            const dtype type = dtype::parse(number);
            CAPTURE(descr);
            CAPTURE(number);
            CHECK_FALSE(can_cast(type, other));
            CHECK_FALSE(can_cast(other, type));
            CHECK_THROWS_AS(cast_elements(type, nullptr, other, nullptr, 0), pinflow::invalid_argument);
        }
    }
    CHECK_FALSE(can_cast(dtype::parse("<M8[ns]"), dtype::parse("<M8[s]")));
    CHECK_FALSE(can_cast(dtype::parse("|S4"), dtype::parse("|S5")));
    CHECK_FALSE(can_cast(dtype::parse("<f4"), dtype::parse("<c8")));
    CHECK_FALSE(can_cast(dtype::parse("<c8"), dtype::parse("<f4")));
    CHECK(contains_all(message_of<pinflow::invalid_argument>([] {
                           cast_elements(dtype::parse("<c8"), nullptr, dtype::parse("<f4"), nullptr, 1);
                       }),
                       {"cannot cast elements", "'<c8' to '<f4'", "at most 8 bytes", "at most 16 bytes"}));
}
