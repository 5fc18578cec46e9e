#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// The distance of a chi-square statistic from its mean in standard deviations. expected[i] is the expected
/// count of cell i. Wilson and Hilferty, "The distribution of chi-square", 1931: the cube root is close to
/// normal for few cells as well.
inline double deviations(std::span<const std::uint64_t> counts, std::span<const double> expected) {
    double chi_square = 0;
    for (std::size_t cell = 0; cell < counts.size(); ++cell) {
        const double difference = static_cast<double>(counts[cell]) - expected[cell];
        chi_square += difference * difference / expected[cell];
    }
    const double freedom = static_cast<double>(counts.size()) - 1;
    const double variance = 2 / (9 * freedom);
    return (std::cbrt(chi_square / freedom) - (1 - variance)) / std::sqrt(variance);
}

/// The same for cells that are equally likely.
inline double deviations(std::span<const std::uint64_t> counts, double expected) {
    return deviations(counts, std::vector<double>(counts.size(), expected));
}
