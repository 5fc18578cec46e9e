#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <set>
#include <utility>

namespace pinflow::detail {

/// The order in which pieces are registered for somebody who reads them from front to back meanwhile: in two
/// rounds, each from the front. See pin_options::first_share.
struct pin_order {
    /// Of `count` pieces. The first round has `first_share` of them, evenly spread; the second round has the
    /// others, or none.
    pin_order(std::size_t count, double first_share, bool registers_rest) {
        const auto share_of = [&](std::size_t pieces) {
            return static_cast<std::size_t>(static_cast<double>(pieces) * first_share);
        };
        for (std::size_t index = 0; index < count; ++index) {
            if (share_of(index + 1) > share_of(index)) {
                first_round.push_back(index);
            } else if (registers_rest) {
                second_round.insert(index);
            }
        }
    }

    std::size_t size() const noexcept { return first_round.size() + second_round.size(); }

    void clear() noexcept {
        first_round.clear();
        second_round.clear();
    }

    struct step {
        std::size_t index;
        bool in_first_round;
    };
    /// Takes the next piece. Those of the first round that are passed are left to the second one.
    template <typename IsPassed>
    std::optional<step> take(IsPassed is_passed) {
        while (!first_round.empty()) {
            const std::size_t index = first_round.front();
            first_round.pop_front();
            if (!is_passed(index)) return step{index, true};
            second_round.insert(index);
        }
        if (second_round.empty()) return {};
        return step{second_round.extract(second_round.begin()).value(), false};
    }

    std::deque<std::size_t> first_round;
    std::set<std::size_t> second_round;
};

}  // namespace pinflow::detail
