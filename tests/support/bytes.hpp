#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

/// Random bytes, and comparing bytes, with memcpy and memcmp: in builds that are not optimised, algorithms on
/// std::byte are too slow for the gigabytes of some tests.

inline bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

inline std::vector<std::byte> random_bytes(std::size_t size_bytes, std::mt19937_64& random) {
    std::vector<std::byte> bytes(size_bytes);
    std::uint64_t state = random();
    for (std::size_t at = 0; at < size_bytes; at += sizeof(std::uint64_t)) {
        // splitmix64
        std::uint64_t word = state += 0x9E3779B97F4A7C15;
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
        word = (word ^ word >> 27) * 0x94D049BB133111EB;
        word ^= word >> 31;
        std::memcpy(bytes.data() + at, &word, std::min(sizeof word, size_bytes - at));
    }
    return bytes;
}
