#pragma once

#include <cstdint>

/// Arithmetic of sizes. It detects overflow, unless noted.
namespace pinflow::detail {

/// @return whether a * b fits. `result` is set only then, and may alias an operand.
[[nodiscard]] constexpr bool multiply(std::uint64_t a, std::uint64_t b, std::uint64_t& result) noexcept {
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) return false;
    result = product;
    return true;
}

/// @return whether a + b fits. `result` is set only then, and may alias an operand.
[[nodiscard]] constexpr bool add(std::uint64_t a, std::uint64_t b, std::uint64_t& result) noexcept {
    std::uint64_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) return false;
    result = sum;
    return true;
}

/// Whether `bytes` is a multiple of `unit_bytes`. The only multiple of 0 is 0.
[[nodiscard]] constexpr bool is_multiple(std::uint64_t bytes, std::uint64_t unit_bytes) noexcept {
    return unit_bytes == 0 ? bytes == 0 : bytes % unit_bytes == 0;
}

/// The smallest multiple of `unit_bytes` (not 0) that is at least `bytes`. Does not detect overflow.
[[nodiscard]] constexpr std::uint64_t rounded_up(std::uint64_t bytes, std::uint64_t unit_bytes) noexcept {
    return (bytes + unit_bytes - 1) / unit_bytes * unit_bytes;
}

/// a * b + c, or 2^64 - 1 if that overflows.
[[nodiscard]] constexpr std::uint64_t saturated(std::uint64_t a, std::uint64_t b,
                                                std::uint64_t c = 0) noexcept {
    std::uint64_t result = 0;
    return multiply(a, b, result) && add(result, c, result) ? result : ~std::uint64_t{0};
}

}  // namespace pinflow::detail
