#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pinflow/train/flat_parameters.hpp"
#include "src/device/flat_work.hpp"

namespace pinflow::detail {

/// Where parameters, their gradients and their states lie in the flat buffers.
struct flat_layout {
    /// In bytes from the beginning of the buffers of parameters and gradients, and of each buffer of state.
    struct place {
        std::uint64_t parameter_bytes = 0;
        std::uint64_t state_bytes = 0;
    };
    std::vector<place> places;  ///< in the order of the parameters
    std::vector<flat_segment> segments;
    std::uint64_t buffer_bytes = 0;  ///< of parameters, and of gradients
    std::uint64_t state_bytes = 0;   ///< of each state
    bool has_small_types = false;    ///< float16 or bfloat16
};

/// Views begin at multiples of this number of bytes.
inline constexpr std::uint64_t view_alignment = 256;

/// The type of the parameter's elements.
/// @throws unsupported for a type that flat parameters cannot have.
flat_type flat_type_of(const parameter_spec& parameter);
/// The size of a number of the parameter's state.
std::uint64_t state_size_bytes(flat_type type) noexcept;
/// The size of a parameter without the gap behind it.
/// @throws invalid_argument from 2^62 bytes on.
std::uint64_t parameter_size_bytes(const parameter_spec& parameter);

/// Lays out parameters by type, then by group, then in their order.
flat_layout lay_out(std::span<const parameter_spec> parameters);

}  // namespace pinflow::detail
