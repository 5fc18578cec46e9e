#include "loader/stages.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for_each.h>
#include <tbb/parallel_invoke.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "loader/ranges.hpp"
#include "loader/run_jobs.hpp"
#include "pinflow/error.hpp"
#include "src/rows/link_profile.hpp"

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// Row ids per task. In a shuffled order, 1024 take some 10 us.
constexpr std::size_t rows_of_sample_task = 1024;
/// Row ids per task in the sequential order, where they are consecutive numbers: 1024 take less time than
/// starting a task.
constexpr std::size_t counted_rows_of_sample_task = 128 * rows_of_sample_task;
/// Up to so many tasks run on the calling thread.
constexpr std::size_t max_serial_tasks = 2;

constexpr range range_of(stage where) noexcept {
    switch (where) {
        case stage::sample:
            return range::sample;
        case stage::fill:
            return range::fill;
        case stage::deliver:
            break;
    }
    return range::deliver;
}

}  // namespace

stages::stages(const parts& what, std::size_t max_groups)
    : what_(what),
      marks_(what.pool.device(), what.pool.slot_count() + watched_groups),
      copies_(what.pool.device()),
      kernels_{stream(what.pool.device()), stream(what.pool.device())},
      lists_(what.pool.device()),
      lists_done_(what.pool.device()) {
    for (std::size_t i = 0; i < max_groups; ++i)
        idle_.push_back(groups_.emplace_back(std::make_unique<slot_group>()).get());
}

void stages::begin() {
    for (const auto& transfer : what_.transfers)
        transfer->begin();
}

bool stages::run_one(std::size_t count) {
    const auto at = [&](slot_group::state reached) {
        return std::ranges::find(begun_, reached, &slot_group::reached);
    };
    if (!begun_.empty() && begun_.front()->reached == slot_group::state::filled) {
        slot_group& oldest = *begun_.front();
        begun_.erase(begun_.begin());
        deliver(oldest);
    } else if (const auto sampled = at(slot_group::state::sampled); sampled != begun_.end()) {
        fill(**sampled);
    } else if (slot_group* const group = take(count)) {
        sample(*group);
        begun_.push_back(group);
    } else {
        return false;
    }
    return true;
}

// ---- sample ----------------------------------------------------------------------------------------------

slot_group* stages::take_group() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return nullptr;
    slot_group* const group = idle_.back();
    idle_.pop_back();
    return group;
}

void stages::give_back(slot_group& group) {
    group.slots.clear();
    group.jobs.clear();
    group.copies.clear();
    group.has_buffered = false;
    group.reached = slot_group::state::idle;
    const std::lock_guard lock(mutex_);
    idle_.push_back(&group);
}

slot_group* stages::take(std::size_t count) {
    const std::uint64_t left = what_.order.batch_count() - next_batch_;
    if (left == 0 || what_.pool.failed()) return nullptr;
    slot_group* const group = take_group();
    if (group == nullptr) return nullptr;
    group->slots = what_.pool.take_free(std::min<std::uint64_t>(count, left));
    if (group->slots.empty()) {
        give_back(*group);
        return nullptr;
    }
    for (slot* const each : group->slots) {
        each->number = next_batch_++;
        each->scheduled = what_.order.at(each->number);
        each->last = each->number + 1 == what_.order.batch_count();
        begin_read(*each);
        run(stage::sample, *each, [&] { begin_batch(*each); });
    }
    return group;
}

/// Sets an error that concerns the whole group on its first slot without an error.
void stages::set_error(slot_group& group, std::exception_ptr error) noexcept {
    const auto first =
        std::ranges::find_if(group.slots, [](const slot* each) { return each->error == nullptr; });
    if (first != group.slots.end()) (*first)->error = std::move(error);
}

template <typename Work>
void stages::run(stage where, slot& slot, Work work) noexcept {
    if (slot.error) return;
    const auto before = clock::now();
    try {
        const profiled_range range(range_of(where), slot.number);
        pass_stage_seam(where, slot.number);
        work();
    } catch (...) {
        slot.error = std::current_exception();
    }
    const std::chrono::nanoseconds spent = clock::now() - before;
    if (where == stage::sample || where == stage::fill) slot.times.cpu += spent;
    if (where == stage::deliver) slot.times.link += spent;
}

void stages::begin_batch(slot& slot) const {
    const std::uint64_t rows = slot.scheduled.row_count;
    try {
        slot.row_ids.resize(rows);
    } catch (const std::exception&) {
        throw system_failure(
            fmt::format("cannot allocate the row ids of a batch of {} rows: they take {} bytes of memory",
                        rows, rows * sizeof(std::uint64_t)),
            std::make_error_code(std::errc::not_enough_memory));
    }
}

void stages::sample(slot_group& group) const {
    struct piece {
        slot* sampled;
        std::size_t begin;
        std::size_t end;
    };
    const auto before = clock::now();
    std::mutex errors;
    const auto write = [&](const piece& part) {
        const rank_batch& taken = part.sampled->scheduled;
        try {
            what_.sampler.rows_at(
                taken.epoch, taken.position + part.begin,
                std::span(part.sampled->row_ids).subspan(part.begin, part.end - part.begin));
        } catch (...) {
            const std::lock_guard lock(errors);
            if (!part.sampled->error) part.sampled->error = std::current_exception();
        }
    };
    const std::size_t task_rows =
        what_.sampler.order() == order::sequential ? counted_rows_of_sample_task : rows_of_sample_task;
    try {
        std::vector<piece> pieces;
        std::size_t row_count = 0;
        for (slot* const each : group.slots) {
            if (each->error) continue;
            const std::size_t rows = each->row_ids.size();
            row_count += rows;
            for (std::size_t begin = 0; begin < rows; begin += task_rows)
                pieces.push_back({each, begin, std::min(rows, begin + task_rows)});
        }
        if (row_count <= max_serial_tasks * task_rows) {
            std::ranges::for_each(pieces, write);
        } else {
            // isolated, so that a thread that waits here does not begin other work
            tbb::this_task_arena::isolate(
                [&] { tbb::parallel_for_each(pieces.begin(), pieces.end(), write); });
        }
    } catch (...) {
        set_error(group, std::current_exception());
    }
    const std::chrono::nanoseconds spent = (clock::now() - before) / group.slots.size();
    for (slot* const each : group.slots)
        each->times.cpu += spent;
    group.reached = slot_group::state::sampled;
}

// ---- fill ------------------------------------------------------------------------------------------------

void stages::fill(slot_group& group) {
    for (slot* const each : group.slots)
        run(stage::fill, *each, [&] { prepare(*each, group); });
    try {
        run_jobs(group, what_.pool, what_.buffers, copies_.first);
    } catch (...) {
        set_error(group, std::current_exception());
    }
    check_files(group);
    group.reached = slot_group::state::filled;
}

void stages::prepare(slot& slot, slot_group& group) {
    if (what_.held) what_.held->prepare(slot);
    for (const auto& transfer : what_.transfers)
        transfer->prepare(slot, group);
    show_arrays(slot);
}

/// Sets the views of the arrays. They are mostly the same as for the slot's last batch.
void stages::show_arrays(slot& slot) const {
    const auto is_shown = [&](const array_view& view, const auto& transfer) {
        return view.data() == transfer->data_of(slot) && view.shape()[0] == slot.row_ids.size();
    };
    if (std::ranges::equal(slot.arrays, what_.transfers, is_shown)) return;
    slot.arrays.clear();
    for (const auto& each : what_.transfers) {
        const row_source& source = *each->array().source;
        shape_vector shape = source.row_shape();
        shape.insert(shape.begin(), slot.row_ids.size());
        slot.arrays.emplace_back(each->data_of(slot), source.dtype(), std::move(shape));
    }
}

/// Checks the files of the batches. If the last unfilled batch of an epoch is among them, checks all files.
/// That batch reaches the consumer before the epoch ends, and so does its error.
void stages::check_files(slot_group& group) {
    const auto check = [](slot& slot, auto how) {
        if (slot.error) return;
        const auto before = clock::now();
        try {
            how();
        } catch (...) {
            slot.error = std::current_exception();
        }
        slot.times.files += clock::now() - before;
    };
    for (slot* const each : group.slots) {
        check(*each, [&] { what_.checks.check_batch(each->row_ids); });
        if (each->error) break;
    }
    for (slot* const each : end_reads(group))
        check(*each, [&] { what_.checks.check_all(); });
}

void stages::begin_read(const slot& slot) {
    const std::lock_guard lock(mutex_);
    if (reads_.empty() || reads_.back().epoch != slot.scheduled.epoch)
        reads_.push_back({.epoch = slot.scheduled.epoch});
    ++reads_.back().batch_count;
    reads_.back().all_taken = slot.scheduled.last_of_epoch || slot.last;
}

std::vector<slot*> stages::end_reads(slot_group& group) {
    std::vector<slot*> last;
    const std::lock_guard lock(mutex_);
    for (slot* const each : group.slots) {
        const auto reads = std::ranges::find(reads_, each->scheduled.epoch, &epoch_reads::epoch);
        if (--reads->batch_count > 0 || !reads->all_taken) continue;
        reads_.erase(reads);
        last.push_back(each);
    }
    return last;
}

// ---- deliver ---------------------------------------------------------------------------------------------

void stages::deliver(slot_group& group) {
    const auto first_failed =
        std::ranges::find_if(group.slots, [](const slot* each) { return each->error != nullptr; });
    const auto good = std::span(group.slots.begin(), first_failed);
    for (slot* const each : good) {
        run(stage::deliver, *each, [&] {
            // the whole group is enqueued at once: if that fails, its first slot gets the error, and the
            // loader ends
            if (each == good.front()) enqueue(good, group);
        });
    }
    what_.pool.deliver(group.slots);
    give_back(group);
}

/// Enqueues row lists and held arrays on their own stream.
/// @return whether kernels will gather rows by these lists.
bool stages::enqueue_lists(std::span<slot* const> slots) {
    bool has_lists = false;
    for (const auto& transfer : what_.transfers)
        has_lists = transfer->enqueue_lists(slots, lists_) || has_lists;
    if (what_.held) what_.held->enqueue(slots, lists_);
    if (has_lists) lists_done_.record(lists_);
    return has_lists;
}

/// Whether at most one group is still being copied, so that the link may soon be idle.
bool stages::is_behind() const {
    return last_marks_[0] == nullptr || last_marks_[0]->done();
}

void stages::enqueue_copies(std::span<const copy_range> copies) {
    if (copies.size() == 1) {
        const copy_range& whole = copies[0];
        return copy_to_device_async(whole.destination, {whole.source, whole.size_bytes}, copies_.first);
    }
    // one stream is faster, as long as one thread enqueues as fast as the link copies
    if (!copies_.second || copies.size() < thresholds.min_split_copies || !is_behind())
        return copy_batch_to_device_async(copies, copies_.first);
    const std::size_t half = copies.size() / 2;
    // not to be cancelled with the pipeline, which then would deliver batches whose copies were skipped
    tbb::task_group_context context(tbb::task_group_context::isolated);
    tbb::this_task_arena::isolate([&] {
        tbb::parallel_invoke([&] { copy_batch_to_device_async(copies.first(half), copies_.first); },
                             [&] { copy_batch_to_device_async(copies.subspan(half), *copies_.second); },
                             context);
    });
    copies_.second_done.record(*copies_.second);
    copies_.first.view().wait(copies_.second_done);
}

void stages::enqueue(std::span<slot* const> slots, slot_group& group) {
    const bool on_host = what_.pool.device().kind() == device_kind::host;
    const bool has_copies = group.has_buffered || !group.copies.empty();
    if (on_host && !has_copies) return;
    const bool has_lists = enqueue_lists(slots);
    if (!group.copies.empty()) enqueue_copies(group.copies);
    std::shared_ptr<data_mark> mark = marks_.take();
    if (has_lists) {
        // a stream of their own, so that copies of the next group wait for no kernel
        const stream& kernels = kernels_[next_stream_++ % kernels_.size()];
        if (has_copies) {
            copies_.done.record(copies_.first);
            kernels.view().wait(copies_.done);
        }
        kernels.view().wait(lists_done_);
        for (const auto& transfer : what_.transfers)
            transfer->enqueue(slots, kernels);
        mark->record(kernels);
    } else if (what_.held) {
        // without a stream that waits for both: it would poll across the link
        mark->record(copies_.first, lists_.view());
    } else {
        mark->record(copies_.first);
    }
    for (slot* const each : slots)
        each->data_mark = mark;
    last_marks_ = {std::move(last_marks_[1]), std::move(mark)};
}

}  // namespace pinflow::detail
