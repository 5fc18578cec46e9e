#pragma once

#include <cstdint>

#include "src/device/digest_mix.hpp"

namespace pinflow::detail {

/// One key for each seed and epoch; both may be small numbers. The multiplier is odd, so that no two epochs
/// of a seed share a key; the permutation scrambles it further.
constexpr std::uint64_t order_key(std::uint64_t seed, std::uint64_t epoch) noexcept {
    return digest_mix(seed + digest_gamma) + epoch * 0xD6E8FEB86659FD93;
}

}  // namespace pinflow::detail
