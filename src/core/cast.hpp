#pragma once

#include <cstddef>
#include <cstdint>

#include "pinflow/dtype.hpp"

namespace pinflow::detail {

/// Whether elements of `from` can be cast to `to`: any type to itself, and little-endian numbers to one
/// another (booleans, integers, floats of at most 8 bytes except float8_e8m0fnu and float8_*fnuz; complex to
/// complex numbers, of at most 16 bytes).
bool can_cast(const dtype& from, const dtype& to) noexcept;

/// Casts `count` elements at `source` to the type `to`, and writes them to `destination`, by the scalar rules
/// of src/core/scalar.hpp: floats round to nearest even, integers saturate. Source and destination must not
/// overlap; any alignment is allowed. Thread-safe.
/// @throws invalid_argument unless can_cast(from, to).
void cast_elements(const dtype& from, const std::byte* source, const dtype& to, std::byte* destination,
                   std::uint64_t count);

}  // namespace pinflow::detail
