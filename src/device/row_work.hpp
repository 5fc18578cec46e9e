#pragma once

#include <cstddef>
#include <cstdint>

/// Arguments of the device operations that gather, scatter and group rows by index, in stream order. Row
/// exchanges, loaders and embedding tables use these operations. nvcc compiles this file, too.
namespace pinflow::detail {

/// Rows in memory that the device can access: device memory or registered host memory.
struct row_memory {
    std::byte* rows = nullptr;  ///< row_count rows, contiguous, with any alignment
    std::uint64_t row_count = 0;
    std::uint64_t row_size_bytes = 0;
    std::uint64_t first_id = 0;  ///< the index of rows[0]; 0 if the operation checks indices
    /// If true, the order has addresses of rows instead of indices, and `rows` and `row_count` are unused.
    /// The device must be able to access the whole pages that contain the rows. For gathers only.
    bool by_address = false;
    bool addresses_are_aligned = false;  ///< addresses and row_size_bytes are multiples of 16
};

/// The errors found in the indices of one call. A call with errors gathers or scatters no rows.
struct index_errors {
    std::uint64_t outside_count = 0;     ///< indices past the last row
    std::uint64_t outside_position = 0;  ///< of the first such index
    std::uint64_t outside_id = 0;        ///< the index at that position
    std::uint64_t repeated_count = 0;    ///< indices that occur earlier in the call; 0 unless that is refused
    std::uint64_t repeated_position = 0;
    std::uint64_t repeated_id = 0;
};

/// What the thread blocks of one operation have counted so far.
struct error_count {
    unsigned long long count = 0;
    unsigned long long complement = 0;  ///< ~(lowest position); 0: there is none
    unsigned finished_blocks = 0;
};

/// Where the operations of one call write the errors that they find.
struct error_memory {
    index_errors* found = nullptr;    ///< in device memory
    index_errors* report = nullptr;   ///< in page-locked memory; written only if there are errors
    error_count* counting = nullptr;  ///< in device memory; zero before and after each operation
};

/// The rows of several batches, in device memory. The rows at positions first[i] ... first[i + 1] - 1 of a
/// group are contiguous at rows[i].
struct row_parts {
    static constexpr unsigned max = 64;

    std::byte* rows[max] = {};
    std::uint64_t first[max + 1] = {};
    unsigned count = 0;
};

/// Indices in processing order, in device memory.
struct row_order {
    const std::uint64_t* ids = nullptr;
    const std::uint32_t* positions = nullptr;  ///< in the group; null: the i-th index is at position i
    std::uint64_t count = 0;
    bool sorted = false;  ///< indices are in ascending order, equal ones in the order of their positions
};

/// How many kernels a GPU sorts a short list with. A long list takes several in any case.
enum class sort_kernels {
    one,  ///< costs the host's thread less, but its blocks wait until all of them fit beside other kernels
    several,  ///< a consumer's kernels delay it less
};

/// A sort of indices in device memory.
struct row_sort {
    const std::uint64_t* ids = nullptr;
    std::uint64_t count = 0;  ///< below 2^32
    /// Of the table. Indices outside it may be sorted to any position. If `ids` are addresses of rows, the
    /// size of the range that they lie in: CUDA then sorts them by their lowest bits alone.
    std::uint64_t row_count = 0;
    std::uint64_t* sorted_ids = nullptr;
    std::uint32_t* positions = nullptr;  ///< of the sorted indices in `ids`
    std::byte* scratch = nullptr;        ///< device_backend::sort_scratch_bytes, at a multiple of 256
    std::uint64_t scratch_bytes = 0;
    sort_kernels kernels = sort_kernels::one;
    /// Where indices outside the table are reported, as check_rows does. If `errors.found` is null, indices
    /// are not checked.
    error_memory errors;
};

/// The indices `begin` ... `end` - 1 of an order.
struct row_range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

/// A grouping of equal indices, in device memory. All lists have `sorted.count` entries, `starts` one more.
struct row_grouping {
    static constexpr unsigned tile = 2048;

    row_order sorted;                      ///< with positions
    const index_errors* errors = nullptr;  ///< if there are some, all groups are 0, and no ids are found
    std::uint64_t split_id = 0;            ///< ids from this one on are in the second range
    std::uint64_t* ids = nullptr;          ///< receives the different indices, in ascending order
    std::int64_t* groups = nullptr;        ///< receives for each position the index of its id in `ids`, or 0
    std::uint32_t* starts = nullptr;       ///< receives where each of `ids` begins in `sorted`; then the end
    std::uint64_t* id_count = nullptr;     ///< receives the number of `ids`
    std::uint64_t* reported_count = nullptr;  ///< in page-locked memory; receives the same
    row_range* ranges = nullptr;  ///< receives the two ranges of `ids`: below split_id, and the others
    std::uint32_t* tile_counts = nullptr;  ///< scratch: a number for each tile of the order
};

/// A copy between rows of a table and rows of batches, for the indices `begin` ... `end` - 1 of an order.
struct row_transfer {
    row_memory table;
    row_order order;
    row_parts parts;
    /// In device memory: what check_rows, sort_rows and refuse_repeated_rows found. If it has errors, no row
    /// moves. Null: the indices are known to be valid, or `report` is set.
    const index_errors* errors = nullptr;
    /// In page-locked memory, zero at first. If it is set, the gather checks the indices itself. If some are
    /// wrong, it writes the errors here and gathers nothing. The order must be unsorted.
    index_errors* report = nullptr;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    /// In device memory: the part of begin ... end - 1 that is moved. Null: all of it. For gathers, and for
    /// scatters that do not sum.
    const row_range* range = nullptr;
    /// The order's indices in the range are strictly ascending, though the order is not marked as sorted.
    bool is_ascending = false;
    /// The table has one row per index of the transfer: its row i belongs to index begin + i of the order.
    /// For equal indices, a gather reads only the row of the first index. A scatter may write all of their
    /// rows, but only the last one is valid (for a sum, the first).
    bool compact = false;
    /// On CUDA, the maximum number of thread blocks of a gather or scatter. 0: as many as the work fills, at
    /// most 16 per SM.
    unsigned blocks = 0;
};

/// A table in device memory, at a multiple of 256 bytes.
struct held_table {
    const std::byte* rows = nullptr;
    std::uint64_t row_size_bytes = 0;
    std::uint64_t offset_bytes = 0;  ///< offset of this table's rows in each batch, a multiple of 256
};

/// A gather of the same rows of several tables in device memory, to several batches, with one launch.
struct held_gather {
    static constexpr unsigned max_tables = 8;

    const std::uint64_t* ids = nullptr;  ///< in device memory or in page-locked memory, known to be valid
    std::uint64_t count = 0;
    row_parts parts;  ///< the batches
    held_table tables[max_tables] = {};
    unsigned table_count = 0;
};

/// Whether contiguous rows at this address can be moved 16 bytes at a time.
inline bool is_aligned(const std::byte* rows, std::uint64_t row_size_bytes) noexcept {
    constexpr std::uintptr_t word_bytes = 16;
    return (reinterpret_cast<std::uintptr_t>(rows) | row_size_bytes) % word_bytes == 0;
}

/// The same for a transfer: for the table and for every batch.
inline bool is_aligned(const row_transfer& transfer) noexcept {
    const row_memory& table = transfer.table;
    const std::uint64_t row_size_bytes = table.row_size_bytes;
    bool aligned = table.by_address ? table.addresses_are_aligned : is_aligned(table.rows, row_size_bytes);
    for (unsigned part = 0; part < transfer.parts.count; ++part)
        aligned = aligned && is_aligned(transfer.parts.rows[part], row_size_bytes);
    return aligned;
}

/// What a scatter writes if several rows have the same index: the last of them, or their sum.
enum class repeated_rows : std::uint8_t { last, sum };

/// The element type of a sum. Integers wrap around.
enum class sum_type : std::uint8_t { float16, bfloat16, float32, float64, int32, int64 };

}  // namespace pinflow::detail
