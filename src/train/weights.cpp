#include <Random123/philox.h>
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <numbers>

#include "pinflow/error.hpp"
#include "pinflow/train/embedding_table.hpp"

namespace pinflow {

namespace {

/// Calls take(column, random) for four columns of a row at a time, with four numbers of 32 bits.
template <typename Take>
void draw(std::uint64_t seed, std::uint64_t row, std::size_t columns, Take take) {
    r123::Philox4x32 philox;
    const auto low = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
    const auto high = [](std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); };
    const r123::Philox4x32::key_type key{{low(seed), high(seed)}};
    for (std::size_t column = 0; column < columns; column += 4)
        take(column, philox({{low(row), high(row), low(column), high(column)}}, key));
}

/// In [0, 1): the upper 24 bits, which float32 has exactly.
float fraction(std::uint32_t random) {
    return static_cast<float>(random >> 8) * 0x1p-24F;
}

}  // namespace

weight_function uniform_weights(float low, float high, std::uint64_t seed) {
    if (!std::isfinite(low) || !std::isfinite(high) || low > high)
        throw invalid_argument(
            fmt::format("uniform weights need finite numbers with low <= high, not {} and {}", low, high));
    return [=](std::uint64_t row, std::span<float> weights) {
        const double width = static_cast<double>(high) - static_cast<double>(low);
        draw(seed, row, weights.size(), [&](std::size_t first, const auto& random) {
            for (std::size_t i = first; i < weights.size() && i < first + 4; ++i)
                weights[i] =
                    static_cast<float>(low + width * static_cast<double>(fraction(random[i - first])));
        });
    };
}

weight_function normal_weights(float mean, float deviation, std::uint64_t seed) {
    if (!std::isfinite(mean) || !std::isfinite(deviation) || deviation < 0)
        throw invalid_argument(fmt::format(
            "normal weights need a finite mean and a deviation from 0 on, not {} and {}", mean, deviation));
    return [=](std::uint64_t row, std::span<float> weights) {
        draw(seed, row, weights.size(), [&](std::size_t first, const auto& random) {
            for (std::size_t i = first; i < weights.size() && i < first + 4; ++i) {
                const std::size_t pair = (i - first) / 2 * 2;
                const double radius =
                    std::sqrt(-2 * std::log1p(-static_cast<double>(fraction(random[pair]))));
                const double angle = 2 * std::numbers::pi * static_cast<double>(fraction(random[pair + 1]));
                const double drawn = radius * ((i - first) % 2 == 0 ? std::cos(angle) : std::sin(angle));
                weights[i] = static_cast<float>(mean + deviation * drawn);
            }
        });
    };
}

}  // namespace pinflow
