#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// The contents of the bench's tables and files.
namespace pinflow::cli {

/// Fills `bytes` with words that are a function of `seed` and their offset, on all cores.
void fill_with_words(std::span<std::byte> bytes, std::uint64_t seed);
/// Whether `bytes` equal the bytes that `fill_with_words` writes at `offset_bytes`.
bool has_words(std::span<const std::byte> bytes, std::uint64_t offset_bytes, std::uint64_t seed);

}  // namespace pinflow::cli
