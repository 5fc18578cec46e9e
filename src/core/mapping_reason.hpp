#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "pinflow/dtype.hpp"

namespace pinflow::detail {

/// One sentence for array::reason of a mapped array; mentions a misaligned offset.
inline std::string mapping_reason(const dtype& type, std::uint64_t offset_bytes, std::uint64_t size_bytes) {
    if (size_bytes == 0) return "there are no bytes to map";
    const std::uint64_t number_bytes = type.swap_size_bytes();
    return offset_bytes % number_bytes == 0
               ? "the file's pages are mapped in place"
               : fmt::format("the file's pages are mapped in place, at an offset that is no multiple of {}",
                             number_bytes);
}

}  // namespace pinflow::detail
