#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "pinflow/loader/sampler.hpp"

namespace pinflow::detail {

/// Implements sampler::windowed, which documents it. Chunks are numbered in the order of the data, beginning
/// at the row where the epoch's cuts start, and wrapping around. A position here is a chunk's place in the
/// shuffled order of the epoch; only `position_count` and the parameter `first` of `rows_at` count rows. A
/// window is a range of chunks' positions.
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
        std::uint64_t first_position;
        std::uint64_t chunk_count;
    };
    window window_of(std::uint64_t position) const noexcept;

    std::uint64_t row_count_;
    std::uint64_t seed_;
    std::uint64_t chunk_rows_ = 1;
    std::uint64_t chunk_count_ = 0;
    std::uint64_t missing_rows_ = 0;  ///< rows that the last chunk lacks
    std::uint64_t chunks_a_window_ = 0;
    std::uint64_t larger_windows_ = 0;  ///< the number of first windows, which have one more position
};

}  // namespace pinflow::detail
