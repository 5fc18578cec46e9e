#pragma once

#include <cstdint>
#include <span>

#include "pinflow/row_source.hpp"
#include "src/core/row_locator.hpp"

namespace pinflow::detail {

/// Finds the extent of a row. Borrows the extents.
class extent_index {
 public:
    explicit extent_index(std::span<const row_extent> extents) : extents_(extents) {
        // the sum cannot overflow: a source has fewer than 2^64 rows
        for (const row_extent& extent : extents)
            static_cast<void>(locator_.add(extent.row_count));
    }

    /// Row number `index` of `extent`.
    struct location {
        const row_extent* extent;
        std::uint64_t index;
    };
    /// The location of a row.
    location find(std::uint64_t row) const noexcept {
        if (extents_.size() == 1) return {extents_.data(), row};
        const auto [part, index] = locator_.find(row);
        return {&extents_[part], index};
    }

 private:
    std::span<const row_extent> extents_;
    row_locator locator_;
};

}  // namespace pinflow::detail
