#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "pinflow/loader/sampler.hpp"

namespace pinflow::detail {

/// Implements sampler::windowed, which documents it. Chunks are numbered in the order of the data, beginning
/// at the epoch's start row, and wrapping around. The turn of a chunk is its index in the
/// shuffled order of the epoch. A window is a range of turns. Positions count rows.
class windowed_order final : public row_sequence {
 public:
    /// At most this many chunks are in a window.
    static constexpr std::uint64_t max_window_chunks = 31;

    /// @param window_rows from 1 to row_count, or 0 if there are no rows
    /// @param row_count at most permutation::max_size
    windowed_order(std::uint64_t row_count, std::uint64_t seed, std::uint64_t window_rows) noexcept;

    std::string name() const override { return "windowed/1"; }
    std::uint64_t position_count() const override { return row_count_; }
    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const override;

 private:
    struct window {
        std::uint64_t number;
        std::uint64_t first_turn;
        std::uint64_t chunk_count;
    };
    window window_of(std::uint64_t turn) const noexcept;

    std::uint64_t row_count_;
    std::uint64_t seed_;
    std::uint64_t chunk_rows_ = 1;
    std::uint64_t chunk_count_ = 0;
    std::uint64_t missing_rows_ = 0;  ///< rows that the last chunk lacks
    std::uint64_t chunks_per_window_ = 0;
    std::uint64_t larger_windows_ = 0;  ///< this many windows, the first ones, have one more chunk
};

}  // namespace pinflow::detail
