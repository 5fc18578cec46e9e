#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PINFLOW_DETAIL_HOST_DEVICE __host__ __device__
#else
#define PINFLOW_DETAIL_HOST_DEVICE
#endif

/// The digest's arithmetic: the host and CUDA use the same functions.
namespace pinflow::detail {

/// 2^64 divided by the golden ratio: the increment of splitmix64 (Steele, Lea, Flood, "Fast splittable
/// pseudorandom number generators", 2014).
inline constexpr std::uint64_t digest_gamma = 0x9E3779B97F4A7C15;

/// splitmix64's finaliser.
PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint64_t digest_mix(std::uint64_t z) noexcept {
    z ^= z >> 30;
    z *= 0xBF58476D1CE4E5B9;
    z ^= z >> 27;
    z *= 0x94D049BB133111EB;
    z ^= z >> 31;
    return z;
}

/// The contribution of word number `index` of a row to the row's hash.
PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint64_t digest_word(std::uint64_t word,
                                                               std::uint64_t index) noexcept {
    return digest_mix(word + (index + 1) * digest_gamma);
}

/// The contribution of a row of array number `index`, with hash `row_hash`, to its sample before the final
/// mix.
PINFLOW_DETAIL_HOST_DEVICE constexpr std::uint64_t digest_part(std::uint64_t row_hash,
                                                               std::uint64_t index) noexcept {
    return digest_mix(row_hash + (index + 1) * digest_gamma);
}

}  // namespace pinflow::detail

#undef PINFLOW_DETAIL_HOST_DEVICE
