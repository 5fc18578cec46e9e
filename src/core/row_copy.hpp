#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// Copying rows on the CPU.
namespace pinflow::detail {

/// Copies rows of equal size from any addresses to contiguous rows at `destination`, on the calling thread.
/// Allocates nothing, so that it can run in run_guarded.
void copy_rows(std::span<const std::byte* const> rows, std::uint64_t row_size_bytes,
               std::byte* destination) noexcept;

// ---- parts of copy_rows and of other copies --------------------------------------------------------------

/// Copies bytes, as memcpy does. On x86, 128 bytes or more are written with non-temporal stores: call
/// finish_streaming afterwards.
void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) noexcept;
/// Makes the copies of stream_copy visible to a thread that is notified afterwards.
void finish_streaming() noexcept;
/// Prefetches the beginning of a row, up to 1 KiB (on x86). The hardware prefetches the rest, which is read
/// in order.
void prefetch_row(const std::byte* row, std::uint64_t row_size_bytes) noexcept;
/// How many rows ahead of the copied row to prefetch.
inline constexpr std::size_t prefetched_rows = 8;

}  // namespace pinflow::detail
