#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pinflow::detail {

/// Indices `begin` ... `end` - 1 of a sorted or unsorted list. Their rows are contiguous in a buffer.
struct row_piece {
    std::span<const std::uint64_t> ids;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t row_size_bytes = 0;
};

/// Which of several neighbouring equal indices takes effect.
enum class kept_duplicate : std::uint8_t { all, first, last };

/// Copies rows from a table to their places in a buffer, on the calling thread. On x86, stores of
/// rows of 128 bytes or more bypass the caches, because the copy engine reads the buffer.
void gather_on_cpu(const std::byte* table, const row_piece& rows, kept_duplicate which,
                   std::byte* buffer) noexcept;

/// Copies rows from their places in a buffer to a table, with the same stores.
void scatter_on_cpu(std::byte* table, const row_piece& rows, kept_duplicate which,
                    const std::byte* buffer) noexcept;

}  // namespace pinflow::detail
