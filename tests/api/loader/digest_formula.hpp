#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "samples.hpp"

/// The digest of samples, word for word as pinflow/loader/digest.hpp defines it.

namespace digest_formula {

inline constexpr std::uint64_t g = 0x9E3779B97F4A7C15;

inline std::uint64_t mix(std::uint64_t z) {
    z ^= z >> 30;
    z *= 0xBF58476D1CE4E5B9;
    z ^= z >> 27;
    z *= 0x94D049BB133111EB;
    z ^= z >> 31;
    return z;
}

/// H(row).
inline std::uint64_t row_hash(std::span<const std::byte> row) {
    std::uint64_t hash = row.size();
    for (std::size_t i = 0; i * 8 < row.size(); ++i) {
        std::uint64_t word = 0;
        for (std::size_t byte = 0; byte < 8 && i * 8 + byte < row.size(); ++byte)
            word |= std::to_integer<std::uint64_t>(row[i * 8 + byte]) << (8 * byte);
        hash += mix(word + (i + 1) * g);
    }
    return hash;
}

/// The term of one sample: `rows` are those of its arrays 0, 1, ...
inline std::uint64_t sample_hash(std::span<const std::span<const std::byte>> rows) {
    std::uint64_t parts = 0;
    for (std::size_t a = 0; a < rows.size(); ++a)
        parts += mix(row_hash(rows[a]) + (a + 1) * g);
    return mix(parts);
}

}  // namespace digest_formula

/// The digest of all rows of a sample, each once.
inline std::uint64_t expected_digest(const known_sample& sample) {
    std::uint64_t digest = 0;
    for (std::uint64_t row = 0; row < sample[0].source->row_count(); ++row) {
        std::vector<std::span<const std::byte>> rows;
        for (const known_array& array : sample)
            rows.push_back(array.row(row));
        digest += digest_formula::sample_hash(rows);
    }
    return digest;
}
