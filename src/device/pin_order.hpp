#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <vector>

namespace pinflow::detail {

/// Chooses the order in which pieces are registered.
/// Without a reader, pieces are taken from piece `first` to the end, then those before it.
/// With a reader, pieces are taken ahead of it. The closer the reader, the more pieces are skipped (0 to 2),
/// so that registered and staged pieces alternate.
/// When no piece is left further ahead, skipped pieces that the reader does not reach soon are taken. All
/// others are taken last, from the front, or never.
class pin_order {
 public:
    /// Orders `count` pieces, beginning at piece `first`. Pieces before `first` come last.
    /// @param registers_rest whether, if there is a reader, pieces that it has passed or comes to soon are
    /// taken in the end
    pin_order(std::size_t count, bool registers_rest, std::size_t first = 0)
        : next_(first), first_(first), registers_rest_(registers_rest) {
        for (std::size_t index = 0; index < count; ++index)
            waiting_.insert(waiting_.end(), index);
    }

    bool empty() const noexcept { return waiting_.empty(); }
    void clear() noexcept { waiting_.clear(); }
    /// Removes the waiting pieces for which `is_unwanted` returns true. It is called in the order in which
    /// pieces are taken without a reader.
    template <typename Predicate>
    void leave_out(Predicate is_unwanted) {
        const auto first = waiting_.lower_bound(first_);
        std::vector<std::size_t> in_order(first, waiting_.end());
        in_order.insert(in_order.end(), waiting_.begin(), first);
        for (const std::size_t index : in_order) {
            if (is_unwanted(index)) waiting_.erase(index);
        }
    }

    struct step {
        std::size_t index;
        bool is_ahead;  ///< when it was taken, the piece was ahead of the reader, or there was no reader
    };
    /// Takes the next piece.
    /// @param reader the piece that is being read, if any
    /// @return nothing if no piece is left to register.
    std::optional<step> take(std::optional<std::size_t> reader) {
        if (!reader) {
            const auto next = take_from(first_, true);
            return next ? next : take_from(0, true);
        }
        // several threads report their position, so only a large step back means that reading restarted
        if (*reader + wanted_lead < last_reader_) next_ = *reader;
        last_reader_ = *reader;
        const std::size_t lead = next_ > *reader ? next_ - *reader : 0;
        const std::size_t skipped_count = lead >= wanted_lead ? 0 : lead >= wanted_lead / 2 ? 1 : 2;
        if (const auto ahead = take_from(std::max(next_ + skipped_count, *reader + 1), true)) return ahead;
        // all pieces further ahead are taken: skipped pieces come next, if they are far enough ahead
        if (const auto ahead = take_from(*reader + wanted_lead / 2, true)) return ahead;
        if (registers_rest_) return take_from(0, false);
        return {};
    }
    /// Whether the reader has passed this piece.
    bool is_passed(std::size_t index, std::optional<std::size_t> reader) const noexcept {
        return reader && index < *reader;
    }
    /// Puts back a piece that the reader has passed.
    void put_back(std::size_t index) { waiting_.insert(index); }

 private:
    /// The wanted distance, in pieces, from the reader to the next piece to register. It covers the pieces
    /// read while four are registered, and the rows prefetched for the consumer.
    static constexpr std::size_t wanted_lead = 16;

    std::optional<step> take_from(std::size_t first, bool is_ahead) {
        const auto found = waiting_.lower_bound(first);
        if (found == waiting_.end()) return {};
        const std::size_t index = waiting_.extract(found).value();
        if (is_ahead) next_ = std::max(next_, index + 1);
        return step{index, is_ahead};
    }

    std::set<std::size_t> waiting_;
    std::size_t next_;  ///< one past the furthest piece that was taken ahead of the reader
    std::size_t last_reader_ = 0;
    std::size_t first_;
    bool registers_rest_;
};

}  // namespace pinflow::detail
