#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

/// Arguments of the device operation that casts elements on their way to the device. nvcc compiles this file,
/// too.
namespace pinflow {

class dtype;

namespace detail {

/// The types that a device casts to one another.
enum class cast_type : std::uint8_t { float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2 };

/// Empty if devices do not cast elements of this type.
std::optional<cast_type> cast_type_of(const dtype& type) noexcept;
const dtype& dtype_of(cast_type type) noexcept;

/// Elements in host memory, and where they go.
struct device_cast {
    const std::byte* source = nullptr;  ///< in a pinned buffer, aligned to 16 bytes
    cast_type from = cast_type::float32;
    std::byte* destination = nullptr;  ///< in device memory, aligned for `to`
    cast_type to = cast_type::float32;
    std::uint64_t count = 0;  ///< of elements
};

}  // namespace detail

}  // namespace pinflow
