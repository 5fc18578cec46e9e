#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

/// Arguments of the device operation that casts elements, swaps their bytes and puts them into another order
/// on their way to the device. nvcc compiles this file, too.
namespace pinflow {

class dtype;

namespace detail {

/// Floats, which a device casts to one another, and elements of some bytes, which it only moves.
enum class converted_type : std::uint8_t {
    float16,
    bfloat16,
    float32,
    float64,
    float8_e4m3fn,
    float8_e5m2,
    bytes1,
    bytes2,
    bytes4,
    bytes8,
    bytes16,
};

/// The type of floats that a device casts; empty for others.
std::optional<converted_type> float_type_of(const dtype& type) noexcept;
/// The type of elements that are only moved; empty if a device has none of this size.
std::optional<converted_type> moved_type_of(std::uint64_t element_bytes) noexcept;
std::uint64_t size_bytes_of(converted_type type) noexcept;
bool is_moved(converted_type type) noexcept;
/// @pre !is_moved(type)
const dtype& dtype_of(converted_type type) noexcept;

/// An axis of an array that is stored in another order than it is delivered.
struct stored_axis {
    std::uint64_t length = 1;
    std::uint64_t stride = 0;  ///< as delivered, in elements
};

/// Elements in host memory that follow each other in their file, and where they go.
struct device_conversion {
    static constexpr std::uint32_t max_axes = 8;

    const std::byte* source = nullptr;  ///< in a pinned buffer, aligned to 16 bytes
    converted_type from = converted_type::bytes1;
    converted_type to = converted_type::bytes1;  ///< another float, or the same type
    /// The bytes of each word of this size are reversed: 1 (not reversed), 2, 4 or 8. A complex number has
    /// two words.
    std::uint32_t word_bytes = 1;
    std::uint64_t count = 0;           ///< of elements
    std::byte* destination = nullptr;  ///< in device memory, aligned for `to`: see axis_count
    /// 0: the elements are delivered in the order of the source, the first one to `destination`. Otherwise
    /// `destination` is the first element of an array with these axes, and the source begins with its element
    /// `first`, counted in stored order: along axes[0] first.
    std::uint32_t axis_count = 0;
    std::uint64_t first = 0;
    stored_axis axes[max_axes] = {};
};

}  // namespace detail

}  // namespace pinflow
