#include "pinflow/loader/sampler.hpp"

#include <numeric>

namespace pinflow {

namespace {

/// One key for each seed and epoch; both may be small numbers. The multiplier is odd, so that no two epochs
/// of a seed share a key; the permutation scrambles it further.
constexpr std::uint64_t key_of(std::uint64_t seed, std::uint64_t epoch) noexcept {
    std::uint64_t z = seed + 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    z ^= z >> 31;
    return z + epoch * 0xD6E8FEB86659FD93;
}

}  // namespace

void sampler::rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const {
    if (order_ == order::sequential) {
        std::iota(rows.begin(), rows.end(), first);
        return;
    }
    const permutation shuffled(row_count_, key_of(seed_, epoch));
    for (std::uint64_t& row : rows) {
        row = shuffled(first++);
    }
}

}  // namespace pinflow
