#include "src/device/cast_work.hpp"

#include <algorithm>
#include <array>

#include "pinflow/dtype.hpp"

namespace pinflow::detail {

namespace {

/// In the order of cast_type.
const std::array<dtype, 6>& cast_dtypes() noexcept {
    static const auto& types =
        *new std::array<dtype, 6>{dtype(dtype_kind::floating, 2),      dtype(dtype_kind::bfloat16, 2),
                                  dtype(dtype_kind::floating, 4),      dtype(dtype_kind::floating, 8),
                                  dtype(dtype_kind::float8_e4m3fn, 1), dtype(dtype_kind::float8_e5m2, 1)};
    return types;
}

}  // namespace

std::optional<cast_type> cast_type_of(const dtype& type) noexcept {
    const auto& types = cast_dtypes();
    const auto found = std::ranges::find(types, type);
    if (found == types.end()) return std::nullopt;
    return static_cast<cast_type>(found - types.begin());
}

const dtype& dtype_of(cast_type type) noexcept {
    return cast_dtypes()[static_cast<std::size_t>(type)];
}

}  // namespace pinflow::detail
