#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pinflow::detail {

/// Indices `begin` ... `end` - 1 of a sorted or unsorted list, whose rows lie one after the other in a slot.
struct placed_rows {
    std::span<const std::uint64_t> ids;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t row_size_bytes = 0;
};

/// Of equal indices that follow each other in a list, which one counts.
enum class of_equal : std::uint8_t { all, first, last };

/// Copies rows from a table to their places in a slot. Stores bypass the caches, as the slot is read by the
/// copy engine. One thread's work.
void gather_on_cpu(const std::byte* table, const placed_rows& rows, of_equal which, std::byte* slot) noexcept;

/// Copies rows from their places in a slot to a table, also past the caches.
void scatter_on_cpu(std::byte* table, const placed_rows& rows, of_equal which,
                    const std::byte* slot) noexcept;

}  // namespace pinflow::detail
