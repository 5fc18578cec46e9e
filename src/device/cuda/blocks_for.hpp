#pragma once

#include <algorithm>
#include <cstdint>

namespace pinflow::detail::cuda {

/// As many blocks as the work has use for, at least one and at most `max_blocks`: the kernels loop over the
/// rest.
constexpr unsigned blocks_for(std::uint64_t work, std::uint64_t work_of_block,
                              std::uint64_t max_blocks) noexcept {
    const std::uint64_t needed = work / work_of_block + (work % work_of_block != 0 ? 1 : 0);
    return static_cast<unsigned>(std::clamp<std::uint64_t>(needed, 1, max_blocks));
}

}  // namespace pinflow::detail::cuda
