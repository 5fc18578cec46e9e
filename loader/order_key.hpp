#pragma once

#include <cstdint>

#include "src/device/digest_mix.hpp"

namespace pinflow::detail {

/// Makes one key for each seed and epoch, which may both be small numbers. The multiplier is odd, so that no
/// two epochs of a seed share a key. The permutation scrambles the key further.
constexpr std::uint64_t order_key(std::uint64_t seed, std::uint64_t epoch) noexcept {
    return digest_mix(seed + digest_gamma) + epoch * 0xD6E8FEB86659FD93;
}

}  // namespace pinflow::detail
