#pragma once

#include <compare>
#include <cstdint>
#include <optional>

#include "pinflow/loader/shard.hpp"

namespace pinflow::detail {

/// A position of the order in one epoch.
struct epoch_position {
    std::uint64_t epoch = 0;
    std::uint64_t position = 0;

    friend auto operator<=>(const epoch_position&, const epoch_position&) = default;
};

/// One batch of a rank: which positions it takes.
struct step {
    std::uint64_t epoch = 0;
    std::uint64_t index = 0;     ///< of the step within the epoch, had all of it been taken in such steps
    std::uint64_t position = 0;  ///< the first of its rows
    std::uint64_t row_count = 0;
    epoch_position begin;        ///< the first position of the step, over all ranks
    epoch_position end;          ///< the first position that no rank has taken when all have done this step
    bool last_of_epoch = false;  ///< for this rank

    friend bool operator==(const step&, const step&) = default;
};

/// What a schedule depends on.
struct schedule_terms {
    std::uint64_t position_count = 0;  ///< of an epoch
    std::uint64_t batch_rows = 1;
    pinflow::shard shard = {};
    pinflow::tail tail = pinflow::tail::partial;
    std::uint64_t epochs = 1;  ///< in all, those before `start` included
    epoch_position start = {};
    std::optional<std::uint64_t> max_steps = std::nullopt;  ///< from `start` on; without it all
};

/// The batches of one rank, from a position to the end of all epochs, as `shard` defines them; each can be
/// asked for directly. The epoch that `start` is in continues from there, the ones after it begin at their
/// position 0. Steps of which this rank has no part are no batches, but count among `max_steps`, so that all
/// ranks end at the same position. A pure function of its terms; thread-safe.
class schedule {
 public:
    /// @throws invalid_argument for batches of no row, a rank outside of its world, a start beyond the epoch,
    /// and more rows than 64 bits count.
    explicit schedule(const schedule_terms& terms);

    std::uint64_t batch_count() const noexcept { return batch_count_; }
    /// The rows of all these batches.
    std::uint64_t row_count() const noexcept { return row_count_; }
    /// The batches of an epoch that is taken from its beginning.
    std::uint64_t batches_per_epoch() const noexcept { return whole_epoch_.batch_count; }
    const epoch_position& start() const noexcept { return terms_.start; }
    /// Where all of these batches, of all ranks, have been delivered.
    const epoch_position& end() const noexcept { return end_; }
    /// Batch `number`, which must be below `batch_count()`.
    step at(std::uint64_t number) const noexcept;

 private:
    /// The steps of an epoch from a position on.
    struct epoch_steps {
        std::uint64_t first_position = 0;
        std::uint64_t full_count = 0;   ///< steps in which every rank has a full batch
        std::uint64_t tail_count = 0;   ///< positions of the step after them, of all ranks; 0: there is none
        std::uint64_t tail_begin = 0;   ///< of this rank's part of them
        std::uint64_t tail_rows = 0;    ///< in this rank's part
        std::uint64_t batch_count = 0;  ///< of this rank
        std::uint64_t row_count = 0;    ///< of this rank

        std::uint64_t step_count() const noexcept { return full_count + (tail_count > 0 ? 1 : 0); }
    };
    epoch_steps steps_from(std::uint64_t position) const noexcept;
    /// Ends after so many steps, unless there are fewer.
    void end_after(std::uint64_t steps) noexcept;

    schedule_terms terms_;
    std::uint64_t step_rows_ = 0;  ///< positions of a full step; 0 when the epoch has less
    epoch_steps first_epoch_;      ///< from `start` on
    epoch_steps whole_epoch_;
    std::uint64_t batch_count_ = 0;
    std::uint64_t row_count_ = 0;
    epoch_position end_;
};

}  // namespace pinflow::detail
