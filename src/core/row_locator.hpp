#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/core/checked.hpp"

namespace pinflow::detail {

/// Finds the part that holds a row, among parts with consecutive rows. Constant time if all parts but the
/// last have the same number of rows, otherwise a binary search.
class row_locator {
 public:
    /// Adds a part after the others.
    /// @return whether the total number of rows fits 64 bits; if not, nothing is added.
    [[nodiscard]] bool add(std::uint64_t row_count) {
        std::uint64_t end = row_count;
        if (!ends_.empty() && !detail::add(end, ends_.back(), end)) return false;
        if (ends_.empty()) {
            equal_rows_ = row_count;
        } else if (ends_.back() != ends_.size() * equal_rows_) {
            equal_rows_ = 0;
        }
        ends_.push_back(end);
        return true;
    }

    /// The number of rows in all parts.
    std::uint64_t row_count() const noexcept { return ends_.empty() ? 0 : ends_.back(); }

    struct location {
        std::size_t part = 0;
        std::uint64_t row = 0;  ///< within the part
    };
    /// The location of a row below `row_count()`.
    location find(std::uint64_t row) const noexcept {
        if (equal_rows_ > 0) {
            const std::uint64_t part = std::min<std::uint64_t>(row / equal_rows_, ends_.size() - 1);
            return {static_cast<std::size_t>(part), row - part * equal_rows_};
        }
        const auto part = static_cast<std::size_t>(std::ranges::upper_bound(ends_, row) - ends_.begin());
        return {part, part == 0 ? row : row - ends_[part - 1]};
    }

 private:
    std::vector<std::uint64_t> ends_;  // of each part, as a row number
    std::uint64_t equal_rows_ = 0;     // rows of each part but the last; 0 if they differ
};

}  // namespace pinflow::detail
