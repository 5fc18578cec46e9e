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

/// A range, the whole pages that it lies on, and which pieces of them are registered.
struct tracked_range {
    tracked_range(pin_range what, std::uint64_t size_of_piece);

    /// Bytes of the range before the piece `index` of its pages, at most all.
    std::uint64_t bytes_before(std::uint64_t index) const noexcept;
    std::uint64_t registered_bytes() const noexcept;
    /// The pages of piece `index`.
    std::span<const std::byte> pages_of_piece(std::uint64_t index) const noexcept;
    bool is_registered(std::uint64_t index) const noexcept {
        return registered[index].load(std::memory_order_acquire);
    }

    pin_range range;
    std::span<const std::byte> pages;
    std::uint64_t piece_bytes;
    std::vector<std::atomic<bool>> registered;  ///< one a piece
    std::size_t first_piece = 0;                ///< among those of all ranges
};

/// What is registered at a time.
struct pin_piece {
    tracked_range* tracked;
    std::uint64_t index;

    std::span<const std::byte> pages() const noexcept { return tracked->pages_of_piece(index); }
    std::uint64_t offset_bytes() const noexcept { return index * tracked->piece_bytes; }
    void set_registered() const noexcept {
        tracked->registered[index].store(true, std::memory_order_release);
    }
};

/// Which bytes of some ranges are registered: one thread tells, through their pieces, and any other asks,
/// without a lock.
class pin_tracker {
 public:
    /// @param piece_bytes a multiple of the page size
    pin_tracker(std::vector<pin_range> ranges, std::uint64_t piece_bytes);

    /// All pieces, in the order of the ranges.
    std::vector<pin_piece> pieces() const;

    bool covers(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    pin_run run_at(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    std::uint64_t registered_prefix_bytes() const noexcept;
    std::uint64_t registered_bytes() const noexcept;
    std::uint64_t total_bytes() const noexcept { return total_bytes_; }

    void set_reader_position(const std::byte* data) noexcept;
    /// The piece that holds the byte at `data`, among all; nothing if none does.
    std::optional<std::size_t> piece_at(const std::byte* data) const noexcept;
    /// The piece that is being read, among all; nothing before set_reader_position was called.
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
    std::vector<address_interval> by_address_;            // but for those that lie within another one
    std::uint64_t total_bytes_ = 0;
    static constexpr std::size_t nobody = ~std::size_t{0};
    std::atomic<std::size_t> reader_piece_ = nobody;
};

}  // namespace pinflow::detail
