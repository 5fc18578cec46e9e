#include "src/device/cuda/held_rows.hpp"

// Gathers rows of tables in device memory. Nothing here waits for the link, and one launch serves all tables.
// A row is copied in pieces of 16, 8, 4, 2 or 1 bytes: the largest of these that divides its size. Its
// address and destination are multiples of the piece size too.

namespace pinflow::detail::cuda {

namespace {

/// Copies rows in pieces of the size of `Piece`. Each thread copies one piece at a time.
template <typename Piece>
__device__ void gather_pieces(const held_gather& work, const held_table& table) {
    const std::uint64_t pieces_of_row = table.row_size_bytes / sizeof(Piece);
    const std::uint64_t pieces = work.count * pieces_of_row;
    const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
    for (std::uint64_t at = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < pieces;
         at += threads) {
        const std::uint64_t position = at / pieces_of_row;
        const std::uint64_t piece = at - position * pieces_of_row;
        unsigned part = 0;
        while (part + 1 < work.parts.count && position >= work.parts.first[part + 1])
            ++part;
        const std::uint64_t row_in_part = position - work.parts.first[part];
        const auto* const from =
            reinterpret_cast<const Piece*>(table.rows + work.ids[position] * table.row_size_bytes);
        auto* const to = reinterpret_cast<Piece*>(work.parts.rows[part] + table.offset_bytes +
                                                  row_in_part * table.row_size_bytes);
        to[piece] = from[piece];
    }
}

__global__ void __launch_bounds__(held_threads) gather(held_gather work) {
    const held_table& table = work.tables[blockIdx.y];
    if (table.row_size_bytes % 16 == 0) {
        gather_pieces<uint4>(work, table);
    } else if (table.row_size_bytes % 8 == 0) {
        gather_pieces<uint2>(work, table);
    } else if (table.row_size_bytes % 4 == 0) {
        gather_pieces<unsigned>(work, table);
    } else if (table.row_size_bytes % 2 == 0) {
        gather_pieces<unsigned short>(work, table);
    } else {
        gather_pieces<unsigned char>(work, table);
    }
}

}  // namespace

const void* gather_held() {
    return reinterpret_cast<const void*>(&gather);
}

}  // namespace pinflow::detail::cuda
