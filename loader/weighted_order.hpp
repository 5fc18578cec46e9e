#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pinflow/loader/sampler.hpp"

namespace pinflow::detail {

/// Implements sampler::weighted, which documents it.
class weighted_order final : public row_sequence {
 public:
    /// @throws invalid_argument as sampler::weighted.
    weighted_order(std::span<const double> weights, std::uint64_t position_count, std::uint64_t seed);

    std::string name() const override { return "weighted/1"; }
    std::uint64_t position_count() const override { return position_count_; }
    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const override;

    /// XXH3 hash of the alias table.
    std::uint64_t content() const noexcept;

 private:
    /// A column of the alias table: a draw from [0, column_size_) gives the column's own row if it is below
    /// `own`, and row `alias` otherwise.
    struct column {
        std::uint64_t own;
        std::uint64_t alias;
    };

    std::uint64_t position_count_;
    std::uint64_t seed_;
    std::uint64_t column_size_ = 0;
    std::vector<column> columns_;
};

}  // namespace pinflow::detail
