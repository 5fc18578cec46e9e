#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

/// Arguments of the device operation that casts elements, swaps their bytes and puts them into another order
/// on their way to the device. nvcc compiles this file, too.
namespace pinflow {

class dtype;

namespace detail {

/// Floats, which a device casts to one another, and opaque elements of 1 to 16 bytes.
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
/// The type of opaque elements; empty if a device has none of this size.
std::optional<converted_type> opaque_type_of(std::uint64_t element_bytes) noexcept;
std::uint64_t size_bytes_of(converted_type type) noexcept;
bool is_opaque(converted_type type) noexcept;
/// @pre !is_opaque(type)
const dtype& dtype_of(converted_type type) noexcept;

/// An axis of the destination.
struct scatter_axis {
    std::uint64_t length = 1;
    std::uint64_t stride = 0;  ///< in elements of the destination
};

/// Contiguous elements in a pinned buffer, and where they go.
struct device_conversion {
    static constexpr std::uint32_t max_axes = 8;

    const std::byte* source = nullptr;  ///< in a pinned buffer, aligned to 16 bytes
    converted_type from = converted_type::bytes1;
    converted_type to = converted_type::bytes1;  ///< another float, or the same type
    /// The bytes of each word of this size are reversed: 1 (not reversed), 2, 4 or 8. A complex number has
    /// two words.
    std::uint32_t swap_size_bytes = 1;
    std::uint64_t count = 0;           ///< of elements
    std::byte* destination = nullptr;  ///< in device memory, aligned for `to`: see axis_count
    /// 0: the elements are delivered in the order of the source, the first one to `destination`. Otherwise
    /// `destination` is the first element of an array with these axes, of which axes[0] varies fastest in the
    /// source. The source begins with element `first`, counted along axes[0] first.
    std::uint32_t axis_count = 0;
    std::uint64_t first = 0;
    scatter_axis axes[max_axes] = {};
};

}  // namespace detail

}  // namespace pinflow
