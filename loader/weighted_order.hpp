#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pinflow/loader/sampler.hpp"

namespace pinflow::detail {

/// sampler::weighted, which says what it is.
class weighted_order final : public row_sequence {
 public:
    /// @throws invalid_argument as sampler::weighted.
    weighted_order(std::span<const double> weights, std::uint64_t position_count, std::uint64_t seed);

    std::string name() const override { return "weighted/1"; }
    std::uint64_t position_count() const override { return position_count_; }
    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const override;

    /// XXH3 of the table.
    std::uint64_t content() const noexcept;

 private:
    /// A column stands for its own row below `own` (of column_size_), and for the row `alias` from there on.
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
