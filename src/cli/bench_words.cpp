#include "src/cli/bench_words.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <cstring>

namespace pinflow::cli {

namespace {

/// The word that fill_with_words writes at `offset_bytes`: splitmix64's finaliser.
std::uint64_t word_at(std::uint64_t offset_bytes, std::uint64_t seed) {
    std::uint64_t z = seed * 0xD1342543DE82EF95 + (offset_bytes + 1) * 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

}  // namespace

void fill_with_words(std::span<std::byte> bytes, std::uint64_t seed) {
    constexpr std::uint64_t piece_bytes = std::uint64_t{1} << 20;
    const std::uint64_t pieces = (bytes.size() + piece_bytes - 1) / piece_bytes;
    tbb::parallel_for(std::uint64_t{0}, pieces, [=](std::uint64_t piece) {
        const std::uint64_t end = std::min<std::uint64_t>((piece + 1) * piece_bytes, bytes.size());
        for (std::uint64_t at = piece * piece_bytes; at < end; at += sizeof(std::uint64_t)) {
            const std::uint64_t word = word_at(at, seed);
            std::memcpy(bytes.data() + at, &word, std::min<std::uint64_t>(sizeof word, end - at));
        }
    });
}

bool has_words(std::span<const std::byte> bytes, std::uint64_t offset_bytes, std::uint64_t seed) {
    while (!bytes.empty()) {
        const std::uint64_t skipped = offset_bytes % sizeof(std::uint64_t);
        const std::uint64_t word = word_at(offset_bytes - skipped, seed);
        const auto word_bytes = std::as_bytes(std::span(&word, 1)).subspan(skipped);
        const std::size_t count = std::min(word_bytes.size(), bytes.size());
        if (std::memcmp(bytes.data(), word_bytes.data(), count) != 0) return false;
        bytes = bytes.subspan(count);
        offset_bytes += count;
    }
    return true;
}

}  // namespace pinflow::cli
