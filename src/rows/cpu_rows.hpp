#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pinflow::detail {

/// The number of bytes that one task moves.
inline constexpr std::uint64_t bytes_of_cpu_task = 256 << 10;

/// Entries `begin` ... `end` - 1 of a sorted or unsorted list of indices. In a buffer, the row of entry i is
/// row number i - `begin`.
struct row_piece {
    std::span<const std::uint64_t> ids;  ///< the whole list: equal neighbours may be outside the piece
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t row_size_bytes = 0;
};

/// Which of several neighbouring equal indices are copied.
enum class kept_duplicate : std::uint8_t { all, first, last };

/// Copies the rows of a piece from a table to a buffer, on the calling thread. Rows of the buffer whose index
/// is not copied are left as they are. On x86, stores of rows of 128 bytes or more bypass the caches, because
/// the copy engine reads the buffer.
void gather_on_cpu(const std::byte* table, const row_piece& rows, kept_duplicate which,
                   std::byte* buffer) noexcept;

/// Copies the rows of a piece from a buffer to a table, with the same stores.
void scatter_on_cpu(std::byte* table, const row_piece& rows, kept_duplicate which,
                    const std::byte* buffer) noexcept;

}  // namespace pinflow::detail
