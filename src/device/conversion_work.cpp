#include "src/device/conversion_work.hpp"

#include <algorithm>
#include <array>

#include "pinflow/dtype.hpp"

namespace pinflow::detail {

namespace {

/// In the order of converted_type.
const std::array<dtype, 6>& float_types() noexcept {
    static const auto& types =
        *new std::array<dtype, 6>{dtype(dtype_kind::floating, 2),      dtype(dtype_kind::bfloat16, 2),
                                  dtype(dtype_kind::floating, 4),      dtype(dtype_kind::floating, 8),
                                  dtype(dtype_kind::float8_e4m3fn, 1), dtype(dtype_kind::float8_e5m2, 1)};
    return types;
}

}  // namespace

std::optional<converted_type> float_type_of(const dtype& type) noexcept {
    const auto& types = float_types();
    const auto found = std::ranges::find(types, type);
    if (found == types.end()) return std::nullopt;
    return static_cast<converted_type>(found - types.begin());
}

std::optional<converted_type> opaque_type_of(std::uint64_t element_bytes) noexcept {
    for (const auto type : {converted_type::bytes1, converted_type::bytes2, converted_type::bytes4,
                            converted_type::bytes8, converted_type::bytes16}) {
        if (size_bytes_of(type) == element_bytes) return type;
    }
    return std::nullopt;
}

std::uint64_t size_bytes_of(converted_type type) noexcept {
    switch (type) {
        case converted_type::float8_e4m3fn:
        case converted_type::float8_e5m2:
        case converted_type::bytes1:
            return 1;
        case converted_type::float16:
        case converted_type::bfloat16:
        case converted_type::bytes2:
            return 2;
        case converted_type::float32:
        case converted_type::bytes4:
            return 4;
        case converted_type::float64:
        case converted_type::bytes8:
            return 8;
        case converted_type::bytes16:
            return 16;
    }
    return 0;
}

bool is_opaque(converted_type type) noexcept {
    return type >= converted_type::bytes1;
}

const dtype& dtype_of(converted_type type) noexcept {
    return float_types()[static_cast<std::size_t>(type)];
}

}  // namespace pinflow::detail
