#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// Copying rows on the CPU.
namespace pinflow::detail {

/// Copies rows of equal size from anywhere to `destination`, one after the other. One thread's work.
/// Allocates nothing, so that it can run guarded.
void copy_rows(std::span<const std::byte* const> rows, std::uint64_t row_size_bytes,
               std::byte* destination) noexcept;

// ---- what it is made of ----------------------------------------------------------------------------------

/// As memcpy, with whole cache lines written past the caches; see finish_streaming.
void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) noexcept;
/// To be called behind stream_copy, before others are reported of the copies.
void finish_streaming() noexcept;
/// Brings the beginning of a row, up to 1 KiB, into the caches: the rest follows by itself, as it is read in
/// order.
void prefetch_row(const std::byte* row, std::uint64_t row_size_bytes) noexcept;
/// So many rows ahead of the one that is being copied.
inline constexpr std::size_t prefetched_rows = 8;

}  // namespace pinflow::detail
