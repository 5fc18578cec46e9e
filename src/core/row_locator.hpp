#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/core/checked.hpp"

namespace pinflow::detail {

/// Finds the part that holds a row, among parts whose rows follow each other: at once if all parts but the
/// last have equally many rows, otherwise by binary search.
class row_locator {
 public:
    /// Adds a part behind the others. @return whether the number of all rows fits; if not, nothing is added.
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

    /// Of all parts.
    std::uint64_t row_count() const noexcept { return ends_.empty() ? 0 : ends_.back(); }

    struct location {
        std::size_t part = 0;
        std::uint64_t row = 0;  ///< within the part
    };
    /// Where a row less than `row_count()` lies.
    location find(std::uint64_t row) const noexcept {
        if (equal_rows_ > 0) {
            const std::uint64_t part = std::min<std::uint64_t>(row / equal_rows_, ends_.size() - 1);
            return {static_cast<std::size_t>(part), row - part * equal_rows_};
        }
        const auto part = static_cast<std::size_t>(std::ranges::upper_bound(ends_, row) - ends_.begin());
        return {part, part == 0 ? row : row - ends_[part - 1]};
    }

 private:
    std::vector<std::uint64_t> ends_;  // of each part, in numbers of all rows
    std::uint64_t equal_rows_ = 0;     // that each part but the last has; 0 if they differ
};

}  // namespace pinflow::detail
