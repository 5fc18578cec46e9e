#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>

namespace pinflow::detail {

/// The order in which pieces are registered: from the front, and ahead of somebody who reads them from the
/// front meanwhile and does without those that he reaches too early. Those come last, from the front, or
/// never.
///
/// How far ahead is found out: a piece that comes too late makes the next one lie further ahead, one that is
/// there long before it is read makes it lie nearer. So whoever reads faster than pieces are registered finds
/// as many of them registered as can be.
class pin_order {
 public:
    pin_order(std::size_t count, bool registers_rest) : registers_rest_(registers_rest) {
        for (std::size_t index = 0; index < count; ++index)
            waiting_.insert(waiting_.end(), index);
    }

    bool empty() const noexcept { return waiting_.empty(); }
    void clear() noexcept { waiting_.clear(); }
    /// Leaves out the pieces that `is_unwanted`, which is asked from the front.
    template <typename Predicate>
    void leave_out(Predicate is_unwanted) {
        std::erase_if(waiting_, is_unwanted);
    }

    struct step {
        std::size_t index;
        bool is_ahead;  ///< of the reader, when it was taken
    };
    /// Takes the next piece; nothing if there is none. `reader` is the first piece that is not passed.
    std::optional<step> take(std::size_t reader) {
        const auto ahead = waiting_.lower_bound(reader == 0 ? 0 : reader + lead_);
        if (ahead != waiting_.end()) return step{waiting_.extract(ahead).value(), true};
        if (!registers_rest_ || waiting_.empty()) return {};
        return step{waiting_.extract(waiting_.begin()).value(), false};
    }
    /// A piece was passed before it was registered.
    void was_late(std::size_t index) {
        lead_ = std::min(lead_ + 1, max_lead);
        waiting_.insert(index);
    }
    /// A piece is registered while a reader is at `reader`.
    void was_registered(std::size_t index, std::size_t reader) noexcept {
        if (reader > index) {
            lead_ = std::min(lead_ + 1, max_lead);
        } else if (index > reader + max_early && lead_ > 0) {
            --lead_;
        }
    }

 private:
    static constexpr std::size_t max_lead = 16;
    static constexpr std::size_t max_early = 2;  ///< pieces before the reader at which a piece may be ready

    std::set<std::size_t> waiting_;
    std::size_t lead_ = 0;
    bool registers_rest_;
};

}  // namespace pinflow::detail
