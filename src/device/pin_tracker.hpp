#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pinflow/pin.hpp"

namespace pinflow::detail {

/// The state of a piece. It changes at most once.
enum class piece_state : unsigned char {
    waiting,
    registered,
    left_out,  ///< will never be registered: refused, or beyond the budget
};

/// A range, the whole pages that contain it, and the state of each piece of these pages.
struct tracked_range {
    tracked_range(pin_range what, std::uint64_t size_of_piece);

    /// The number of bytes of the range before piece `index`; at most the size of the range.
    std::uint64_t bytes_before(std::uint64_t index) const noexcept;
    std::uint64_t registered_bytes() const noexcept;
    /// The pages of piece `index`.
    std::span<const std::byte> pages_of_piece(std::uint64_t index) const noexcept;
    bool is_registered(std::uint64_t index) const noexcept {
        return state_of(index) == piece_state::registered;
    }
    piece_state state_of(std::uint64_t index) const noexcept {
        return states[index].load(std::memory_order_acquire);
    }

    pin_range range;
    std::span<const std::byte> pages;
    std::uint64_t piece_bytes;
    std::vector<std::atomic<piece_state>> states;  ///< one per piece
    std::size_t first_piece = 0;  ///< index of its first piece among the pieces of all ranges
};

/// The unit of registration: one piece of a range.
struct pin_piece {
    tracked_range* tracked;
    std::uint64_t index;

    std::span<const std::byte> pages() const noexcept { return tracked->pages_of_piece(index); }
    std::uint64_t offset_bytes() const noexcept { return index * tracked->piece_bytes; }
    void set_state(piece_state state) const noexcept {
        tracked->states[index].store(state, std::memory_order_release);
    }
};

/// Tracks which bytes of some ranges are registered. One thread sets the states of pieces. Any thread may
/// query or set the reader's position, without a lock.
class pin_tracker {
 public:
    /// @param piece_bytes a multiple of the page size
    pin_tracker(std::vector<pin_range> ranges, std::uint64_t piece_bytes);

    /// All pieces, in the order of the ranges.
    std::vector<pin_piece> pieces() const;

    // as in pinned_pages. If the bytes asked for leave the ranges, they count as not registered from there
    // on.
    bool covers(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    /// Whether all these bytes lie in the ranges, and none of their pieces is left out.
    bool may_cover(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    pin_run run_at(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    std::uint64_t registered_prefix_bytes() const noexcept;
    std::uint64_t registered_bytes() const noexcept;
    std::uint64_t total_bytes() const noexcept { return total_bytes_; }

    /// Ignores addresses outside the ranges.
    void set_reader_position(const std::byte* data) noexcept;
    /// The index, among all pieces, of the piece that contains the byte at `data`; nothing if none does.
    std::optional<std::size_t> piece_at(const std::byte* data) const noexcept;
    /// The index, among all pieces, of the piece being read; nothing before the first set_reader_position.
    std::optional<std::size_t> reader() const noexcept {
        const std::size_t piece = reader_piece_.load(std::memory_order_relaxed);
        return piece == nobody ? std::nullopt : std::optional(piece);
    }

 private:
    struct address_interval {
        const std::byte* begin;
        const std::byte* end;
        tracked_range* tracked;
    };
    tracked_range* find(const std::byte* data) const noexcept;

    std::vector<std::unique_ptr<tracked_range>> ranges_;  // as given
    std::vector<address_interval> by_address_;            // without ranges that lie within another
    std::uint64_t total_bytes_ = 0;
    static constexpr std::size_t nobody = ~std::size_t{0};
    std::atomic<std::size_t> reader_piece_ = nobody;
};

}  // namespace pinflow::detail
