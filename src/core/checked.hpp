#pragma once

#include <cstdint>
#include <span>

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

/// Whether an array of this shape has less than 2^63 bytes, so that every distance in it fits in a stride. As
/// in numpy, a length of 0 counts as 1.
[[nodiscard]] constexpr bool fits_strides(std::span<const std::uint64_t> shape,
                                          std::uint64_t item_size_bytes) noexcept {
    constexpr std::uint64_t limit = std::uint64_t{1} << 63;
    for (const std::uint64_t length : shape) {
        if (length != 0 && !multiply(item_size_bytes, length, item_size_bytes)) return false;
        if (length >= limit) return false;  // also of items without bytes
    }
    return item_size_bytes < limit;
}

}  // namespace pinflow::detail
