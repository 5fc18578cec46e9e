#pragma once

#include <cstddef>
#include <cstdint>

/// Gathering and scattering rows by index, as a device does it in a stream's order: what the routes of
/// pinflow/rows.hpp are made of. In the form that nvcc's C++17 takes.
namespace pinflow::detail {

/// Rows in memory that the device reaches: its own, or registered host memory.
struct row_memory {
    std::byte* rows = nullptr;  ///< row_count rows, one after the other, with any alignment
    std::uint64_t row_count = 0;
    std::uint64_t row_size_bytes = 0;
    /// Rows that lie anywhere, on whole pages that the device reaches: the order has their addresses instead
    /// of indices, and `rows` and `row_count` are not used. To gather only.
    bool by_address = false;
    bool addresses_are_aligned = false;  ///< to 16 bytes, and row_size_bytes is
};

/// What has been found wrong with the indices of one call, in device memory, zero at first. While there is
/// something wrong nothing is gathered or scattered.
struct index_errors {
    unsigned long long outside_count = 0;       ///< indices past the last row
    unsigned long long outside_complement = 0;  ///< ~(position of the first of them); 0: there is none
    unsigned long long repeated_count = 0;      ///< indices that occurred before, when that is refused
    unsigned long long repeated_complement = 0;
    std::uint64_t outside_id = 0;  ///< the index at that position
    std::uint64_t repeated_id = 0;
};

/// The rows of several batches, in device memory: those at positions first[i] ... first[i + 1] - 1 of a group
/// lie one after the other at rows[i].
struct row_parts {
    static constexpr unsigned max = 64;

    std::byte* rows[max] = {};
    std::uint64_t first[max + 1] = {};
    unsigned count = 0;
};

/// Indices in the order in which they are worked on, in device memory.
struct row_order {
    const std::uint64_t* ids = nullptr;
    const std::uint32_t* positions = nullptr;  ///< in the group; null: the i-th index is at position i
    std::uint64_t count = 0;
    bool sorted = false;  ///< equal indices are contiguous, the lower position first
};

/// Rows of a table to or from those of batches: the indices `begin` ... `end` - 1 of an order.
struct row_transfer {
    row_memory table;
    row_order order;
    row_parts parts;
    const index_errors* errors = nullptr;  ///< in device memory; null: the indices are known to be right
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    /// The table has one row per index of the transfer: its row i belongs to index begin + i of the order. If
    /// indices are equal, a gather reads only the row of the first. A scatter may write all of their rows.
    /// Only the last of these counts (for a sum, the first).
    bool compact = false;
    /// Of threads, on CUDA, where host memory is read or written; 0: enough for everything at once.
    unsigned blocks = 0;
};

/// A table in device memory, at a multiple of 256 bytes.
struct held_table {
    const std::byte* rows = nullptr;
    std::uint64_t row_size_bytes = 0;
    std::uint64_t offset_bytes =
        0;  ///< into each batch: where its rows of this table begin, a multiple of 256
};

/// The same rows of several tables in device memory, to several batches in one go.
struct held_gather {
    static constexpr unsigned max_tables = 8;

    const std::uint64_t* ids = nullptr;  ///< in device memory, known to be right
    std::uint64_t count = 0;
    row_parts parts;  ///< the batches
    held_table tables[max_tables] = {};
    unsigned table_count = 0;
};

/// Whether rows that lie here, one after the other, can be moved 16 bytes at a time.
inline bool is_aligned(const std::byte* rows, std::uint64_t row_size_bytes) noexcept {
    constexpr std::uintptr_t word_bytes = 16;
    return (reinterpret_cast<std::uintptr_t>(rows) | row_size_bytes) % word_bytes == 0;
}

/// Of a transfer: those of the table and those of every batch.
inline bool is_aligned(const row_transfer& transfer) noexcept {
    const row_memory& table = transfer.table;
    const std::uint64_t row_size_bytes = table.row_size_bytes;
    bool aligned = table.by_address ? table.addresses_are_aligned : is_aligned(table.rows, row_size_bytes);
    for (unsigned part = 0; part < transfer.parts.count; ++part)
        aligned = aligned && is_aligned(transfer.parts.rows[part], row_size_bytes);
    return aligned;
}

/// Which of several rows with one index is written.
enum class repeated_rows : std::uint8_t { last, sum };

/// What a sum adds up; integers wrap around.
enum class sum_type : std::uint8_t { float16, bfloat16, float32, float64, int32, int64 };

}  // namespace pinflow::detail
