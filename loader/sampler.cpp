#include "pinflow/loader/sampler.hpp"

#include <numeric>

#include "src/device/digest_mix.hpp"

namespace pinflow {

namespace {

/// One key for each seed and epoch; both may be small numbers. The multiplier is odd, so that no two epochs
/// of a seed share a key; the permutation scrambles it further.
constexpr std::uint64_t key_of(std::uint64_t seed, std::uint64_t epoch) noexcept {
    return detail::digest_mix(seed + detail::digest_gamma) + epoch * 0xD6E8FEB86659FD93;
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
