#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

namespace pinflow::detail {

/// Pages that holders have reserved from a budget. Pages reserved by several holders count once, because they
/// are registered once. With n reservations, a call takes O(log n) plus one step for each edge of another
/// reservation within its pages. Not thread-safe.
class pin_reservations {
 public:
    /// Reserves `pages`.
    /// @return false, without reserving anything, if `pages` contains unreserved pages and the total reserved
    /// would exceed `budget_bytes`.
    bool add(std::span<const std::byte> pages, std::uint64_t budget_bytes);
    /// Removes one reservation of `pages`, made by an earlier `add`.
    void remove(std::span<const std::byte> pages) noexcept;
    /// The size of all reserved pages.
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }

 private:
    struct edge {
        std::uint64_t holders = 0;  ///< holders of the pages from here to the next edge
        std::uint64_t uses = 0;     ///< reservations that begin or end here; at 0 the edge is removed
    };
    using edges = std::map<std::uintptr_t, edge>;

    edges::iterator use_edge(std::uintptr_t address);
    void drop_edge(edges::iterator which) noexcept;

    edges edges_;
    std::uint64_t size_bytes_ = 0;
};

}  // namespace pinflow::detail
