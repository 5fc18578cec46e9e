#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// What tables and files of a bench are filled with.
namespace pinflow::cli {

/// Fills `bytes` with words that are a function of `seed` and their place, by all cores.
void fill_with_words(std::span<std::byte> bytes, std::uint64_t seed);
/// Whether `bytes` are those that `fill_with_words` leaves `place_bytes` behind its first one.
bool has_words(std::span<const std::byte> bytes, std::uint64_t place_bytes, std::uint64_t seed);

}  // namespace pinflow::cli
