#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

namespace pinflow::detail {

/// Pages that holders have set aside of a budget. Those that several have set aside count once, as they are
/// registered once. A call takes O(log n) for n reservations, and a step for each edge of others within its
/// pages. Not thread-safe.
class pin_reservations {
 public:
    /// Sets `pages` aside. @return false, and does nothing, if pages among them that nobody has set aside yet
    /// would exceed `budget_bytes` together with those that somebody has.
    bool add(std::span<const std::byte> pages, std::uint64_t budget_bytes);
    /// Gives back `pages` of an earlier `add`, by one of their holders.
    void remove(std::span<const std::byte> pages) noexcept;
    /// Of all pages that somebody has set aside.
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }

 private:
    struct edge {
        std::uint64_t holders = 0;  ///< of the pages from here to the next edge
        std::uint64_t uses = 0;  ///< reservations that begin or end here: it stays as long as there are some
    };
    using edges = std::map<std::uintptr_t, edge>;

    edges::iterator use_edge(std::uintptr_t address);
    void drop_edge(edges::iterator which) noexcept;

    edges edges_;
    std::uint64_t size_bytes_ = 0;
};

}  // namespace pinflow::detail
