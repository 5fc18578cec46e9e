#include "loader/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow::detail {

namespace {

/// floor(count * rank / world), where the product may need more than 64 bits.
constexpr std::uint64_t part_begin(std::uint64_t count, std::uint64_t rank, std::uint64_t world) noexcept {
    return count / world * rank + count % world * rank / world;
}

schedule_terms checked(const schedule_terms& terms) {
    if (terms.batch_rows == 0) throw invalid_argument("a batch needs at least one row");
    if (terms.shard.rank >= terms.shard.world) {
        throw invalid_argument(
            fmt::format("there is no rank {} among {} processes: a rank is less than the number of processes",
                        terms.shard.rank, terms.shard.world));
    }
    if (terms.start.position >= std::max<std::uint64_t>(1, terms.position_count)) {
        throw invalid_argument(fmt::format("position {} is not below the {} positions of an epoch",
                                           terms.start.position, terms.position_count));
    }
    return terms;
}

}  // namespace

schedule::schedule(const schedule_terms& terms) : terms_(checked(terms)) {
    if (!multiply(terms.batch_rows, terms.shard.world, step_rows_) || step_rows_ > terms.position_count) {
        step_rows_ = 0;
    }
    whole_epoch_ = steps_from(0);
    end_ = terms.start;
    if (terms.start.epoch >= terms.epochs) return;
    end_ = {terms.epochs, 0};
    first_epoch_ = steps_from(terms.start.position);
    const std::uint64_t whole_epochs = terms.epochs - terms.start.epoch - 1;
    // a batch has at least one row, so the number of batches cannot overflow if the number of rows does not
    if (!multiply(whole_epochs, whole_epoch_.row_count, row_count_) ||
        !add(row_count_, first_epoch_.row_count, row_count_)) {
        throw invalid_argument(
            fmt::format("{} epochs of {} rows are too many", terms.epochs, terms.position_count));
    }
    batch_count_ = first_epoch_.batch_count + whole_epochs * whole_epoch_.batch_count;
    if (terms.max_steps) end_after(*terms.max_steps);
}

void schedule::end_after(std::uint64_t steps) noexcept {
    const bool in_first = steps == 0 || steps < first_epoch_.step_count();
    const epoch_steps& last = in_first ? first_epoch_ : whole_epoch_;
    epoch_position end = terms_.start;
    std::uint64_t batches = 0;
    std::uint64_t rows = 0;
    if (!in_first) {
        steps -= first_epoch_.step_count();
        if (last.step_count() == 0) return;
        const std::uint64_t whole_epochs = steps / last.step_count();
        end = {terms_.start.epoch + 1, 0};
        if (whole_epochs >= terms_.epochs - end.epoch) return;
        end.epoch += whole_epochs;
        steps -= whole_epochs * last.step_count();
        batches = first_epoch_.batch_count + whole_epochs * last.batch_count;
        rows = first_epoch_.row_count + whole_epochs * last.row_count;
    }
    // the remaining steps are full, because a tail would have ended the epoch
    end_ = {end.epoch, end.position + steps * step_rows_};
    batch_count_ = batches + steps;
    row_count_ = rows + steps * terms_.batch_rows;
}

schedule::epoch_steps schedule::steps_from(std::uint64_t position) const noexcept {
    const auto& [rank, world] = terms_.shard;
    const std::uint64_t left = terms_.position_count - position;
    epoch_steps steps;
    steps.first_position = position;
    steps.full_count = step_rows_ == 0 ? 0 : left / step_rows_;
    if (terms_.tail == tail::partial) {
        steps.tail_count = left - steps.full_count * step_rows_;
        steps.tail_begin = part_begin(steps.tail_count, rank, world);
        steps.tail_rows = part_begin(steps.tail_count, std::uint64_t{rank} + 1, world) - steps.tail_begin;
    }
    steps.batch_count = steps.full_count + (steps.tail_rows > 0 ? 1 : 0);
    steps.row_count = steps.full_count * terms_.batch_rows + steps.tail_rows;
    return steps;
}

rank_batch schedule::at(std::uint64_t number) const noexcept {
    const bool in_first = number < first_epoch_.batch_count;
    const epoch_steps& steps = in_first ? first_epoch_ : whole_epoch_;
    rank_batch batch;
    batch.epoch = terms_.start.epoch;
    std::uint64_t index = number;
    if (!in_first) {
        index -= first_epoch_.batch_count;
        batch.epoch += 1 + index / steps.batch_count;
        index %= steps.batch_count;
    }
    batch.index = index + (step_rows_ == 0 ? 0 : steps.first_position / step_rows_);
    batch.begin = {batch.epoch, steps.first_position + index * step_rows_};
    batch.last_of_epoch = index + 1 == steps.batch_count;
    const bool full = index < steps.full_count;
    batch.position = batch.begin.position + (full ? terms_.shard.rank * terms_.batch_rows : steps.tail_begin);
    batch.row_count = full ? terms_.batch_rows : steps.tail_rows;
    // an epoch ends with its last step, even if a dropped tail leaves rows
    const bool more_steps = full && (index + 1 < steps.full_count || steps.tail_count > 0);
    batch.end = more_steps ? epoch_position{batch.epoch, batch.begin.position + step_rows_}
                           : epoch_position{batch.epoch + 1, 0};
    return batch;
}

}  // namespace pinflow::detail
