#pragma once

#include <compare>
#include <cstdint>
#include <optional>

#include "pinflow/loader/shard.hpp"

namespace pinflow::detail {

/// A position in the order of one epoch.
struct epoch_position {
    std::uint64_t epoch = 0;
    std::uint64_t position = 0;

    friend auto operator<=>(const epoch_position&, const epoch_position&) = default;
};

/// The part of one step that one rank delivers as a batch. A step is one batch of every rank.
struct rank_batch {
    std::uint64_t epoch = 0;
    /// Index of the step in the epoch, counted as if the epoch began at position 0 with steps of this size.
    std::uint64_t index = 0;
    std::uint64_t position = 0;  ///< the first of its rows
    std::uint64_t row_count = 0;
    epoch_position begin;        ///< the first position of the step, over all ranks
    epoch_position end;          ///< where the next step of all ranks begins: in this epoch or the next
    bool last_of_epoch = false;  ///< for this rank

    friend bool operator==(const rank_batch&, const rank_batch&) = default;
};

/// The parameters of a schedule.
struct schedule_terms {
    std::uint64_t position_count = 0;  ///< of an epoch
    std::uint64_t batch_rows = 1;
    pinflow::shard shard = {};
    pinflow::tail tail = pinflow::tail::partial;
    std::uint64_t epochs = 1;  ///< total, including epochs before `start`
    epoch_position start = {};
    std::optional<std::uint64_t> max_steps = std::nullopt;  ///< from `start` on; nothing: all steps
};

/// The batches of one rank, as `shard` defines them, from a position to the end of all epochs, with random
/// access. The first epoch begins at `start`, later epochs at position 0. A step without rows for this rank
/// is not a batch, but it counts towards `max_steps`, so that all ranks end at the same position. A pure
/// function of its terms. Thread-safe.
class schedule {
 public:
    /// @throws invalid_argument if batches have no rows, the rank is not below the world size, the start is
    /// beyond the epoch, or the number of rows exceeds 64 bits.
    explicit schedule(const schedule_terms& terms);

    std::uint64_t batch_count() const noexcept { return batch_count_; }
    /// The number of rows of all these batches.
    std::uint64_t row_count() const noexcept { return row_count_; }
    /// The number of batches of an epoch that begins at position 0.
    std::uint64_t batches_per_epoch() const noexcept { return whole_epoch_.batch_count; }
    const epoch_position& start() const noexcept { return terms_.start; }
    /// The position after all of these batches, of all ranks.
    const epoch_position& end() const noexcept { return end_; }
    /// Batch `number`, which must be below `batch_count()`.
    rank_batch at(std::uint64_t number) const noexcept;

 private:
    /// The steps of an epoch, beginning at a position.
    struct epoch_steps {
        std::uint64_t first_position = 0;
        std::uint64_t full_count = 0;   ///< steps in which every rank has a full batch
        std::uint64_t tail_count = 0;   ///< positions of the step after them, of all ranks; 0: there is none
        std::uint64_t tail_begin = 0;   ///< where this rank's part of the tail begins, in the tail
        std::uint64_t tail_rows = 0;    ///< rows in this rank's part of the tail
        std::uint64_t batch_count = 0;  ///< of this rank
        std::uint64_t row_count = 0;    ///< of this rank

        std::uint64_t step_count() const noexcept { return full_count + (tail_count > 0 ? 1 : 0); }
    };
    epoch_steps steps_from(std::uint64_t position) const noexcept;
    /// Ends the schedule after `steps` steps, unless it has fewer.
    void end_after(std::uint64_t steps) noexcept;

    schedule_terms terms_;
    std::uint64_t step_rows_ = 0;  ///< positions of a full step; 0 if the epoch has fewer
    epoch_steps first_epoch_;      ///< from `start` on
    epoch_steps whole_epoch_;
    std::uint64_t batch_count_ = 0;
    std::uint64_t row_count_ = 0;
    epoch_position end_;
};

}  // namespace pinflow::detail
