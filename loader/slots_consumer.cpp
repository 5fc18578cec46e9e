#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "loader/slots.hpp"
#include "pinflow/error.hpp"

// The consumer's side of a slot_pool: leases, and how they end.

namespace pinflow::detail {

namespace {

/// How long a consumer waits for data before it checks that the data is still that of the next batch. Another
/// consumer may have taken the slot, and the slot may have been filled again.
constexpr std::chrono::microseconds data_look_interval{2000};

/// The first of the pools that are kept for ever. The list shows leak checkers that this is meant.
std::atomic<slot_pool*> first_kept_pool = nullptr;

bool is_known_complete(const slot& slot) {
    return slot.data_mark == nullptr || slot.data_mark->known_done();
}

}  // namespace

std::uint64_t slot_pool::count_ready(std::unique_lock<std::mutex>& lock) {
    if (!awaits_data_) return delivered_.size();
    for (;;) {
        // count only up to the first incomplete batch: batches may alternate between two streams
        while (complete_count_ < delivered_.size() && is_known_complete(*delivered_[complete_count_]))
            ++complete_count_;
        if (complete_count_ == delivered_.size()) return complete_count_;
        const std::shared_ptr<const data_mark> next = delivered_[complete_count_]->data_mark;
        lock.unlock();
        const bool done = next->done();
        lock.lock();
        if (!done) return complete_count_;
    }
}

std::chrono::nanoseconds slot_pool::await_data(std::unique_lock<std::mutex>& lock, const data_mark& mark) {
    const auto before = wait_times::clock::now();
    times_.begin_data_wait(before);
    wake_driver();
    const auto stop_waiting = [&] {
        const auto after = wait_times::clock::now();
        times_.end_data_wait(after);
        return after - before;
    };
    lock.unlock();
    try {
        mark.synchronize_for(data_look_interval);
    } catch (...) {
        lock.lock();
        stop_waiting();
        throw;
    }
    lock.lock();
    return stop_waiting();
}

slot* slot_pool::lease(lease_when when) {
    const bool with_data = when == lease_when::complete || awaits_data_;
    std::unique_lock lock(mutex_);
    const auto before = times_.now();
    times_.ask(before);
    const std::chrono::nanoseconds consumer_wait_before = times_.consumer_wait(before);
    const std::uint64_t ready_before = std::exchange(had_to_wait_, false) ? 0 : count_ready(lock);
    std::chrono::nanoseconds data_wait{};
    for (;;) {
        slot_delivered_.wait(lock, [&] { return has_next(); });
        if (delivered_.empty() || !with_data) break;
        const std::shared_ptr<const data_mark> mark = delivered_.front()->data_mark;
        if (mark == nullptr || mark->known_done()) break;
        data_wait += await_data(lock, *mark);
    }
    if (!delivered_.empty()) {
        slot* const next = delivered_.front();
        delivered_.pop_front();
        complete_count_ -= std::min<std::size_t>(complete_count_, 1);
        ++leased_;
        next->ready_before = ready_before;
        ++statistics_.batches;
        statistics_.rows += next->row_ids.size();
        statistics_.ready_sum += ready_before;
        statistics_.max_ready = std::max(statistics_.max_ready, ready_before);
        statistics_.reached = std::max(statistics_.reached, std::optional(next->scheduled.end));
        // while the loader waits for the consumer's streams, the consumer does not wait for the loader
        const auto after = times_.now();
        const std::chrono::nanoseconds waited = after.at - before.at - data_wait;
        const std::chrono::nanoseconds for_consumer = times_.consumer_wait(after) - consumer_wait_before;
        times_.add_wait(next->times, std::exchange(early_wait_, {}) + std::max(waited - for_consumer, {}),
                        data_wait);
        if (delivered_.empty() && finished_) times_.end_consumer_wait();
        // all slots are leased: wake other waiting consumers, which would wait for ever
        if (leased_ == slots_.size()) slot_delivered_.notify_all();
        wake_driver();
        return next;
    }
    if (finished_) times_.end();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (finished_) {
        statistics_.ended = !failed_ && !stopped_;
        return nullptr;
    }
    std::string held;
    if (held_by_tensors_ > 0) held += fmt::format(", {} of them held by tensors alone", held_by_tensors_);
    if (lost_ > 0)
        held += fmt::format(", {} of them lost: no event could be recorded in their streams", lost_);
    throw all_slots_leased(fmt::format(
        "there is no slot left for another batch: all {} are leased{}; release batches and their tensors, or "
        "give the loader more slots",
        slots_.size(), held));
}

bool slot_pool::wait_for_next(std::chrono::nanoseconds timeout) {
    constexpr std::chrono::hours longest{24 * 365};  // a point in time beyond might not exist
    std::unique_lock lock(mutex_);
    had_to_wait_ = false;
    if (has_next()) return true;
    const auto before = times_.now();
    times_.ask(before);
    const std::chrono::nanoseconds consumer_wait_before = times_.consumer_wait(before);
    const bool has = slot_delivered_.wait_for(lock, std::min<std::chrono::nanoseconds>(timeout, longest),
                                              [&] { return has_next(); });
    const auto after = times_.now();
    const std::chrono::nanoseconds for_consumer = times_.consumer_wait(after) - consumer_wait_before;
    early_wait_ += std::max<std::chrono::nanoseconds>(after.at - before.at - for_consumer, {});
    had_to_wait_ = true;
    return has;
}

void slot_pool::end_lease(slot& leased) noexcept {
    const std::lock_guard lock(mutex_);
    --leased_;
    if (std::exchange(leased.is_held_by_tensors, false)) --held_by_tensors_;
    free_.push_back(&leased);
    wake_driver();
}

void slot_pool::lose(slot& leased, std::shared_ptr<slot_pool> self) noexcept {
    const std::lock_guard lock(mutex_);
    if (std::exchange(leased.is_held_by_tensors, false)) --held_by_tensors_;
    ++lost_;
    if (kept_) return;
    kept_ = std::move(self);
    next_kept_ = first_kept_pool.exchange(this);
}

void slot_pool::leave_to_tensors(slot& leased) noexcept {
    const std::lock_guard lock(mutex_);
    leased.is_held_by_tensors = true;
    ++held_by_tensors_;
}

void slot_pool::undo_lease(slot& leased) {
    {
        const std::lock_guard lock(mutex_);
        // other consumers may have leased later batches, and may undo that too
        delivered_.insert(std::ranges::find_if(
                              delivered_, [&](const slot* other) { return other->number > leased.number; }),
                          &leased);
        complete_count_ = 0;
        --leased_;
        --statistics_.batches;
        statistics_.rows -= leased.row_ids.size();
        statistics_.ready_sum -= leased.ready_before;
        statistics_.ended = false;
        times_.undo_end();
    }
    slot_delivered_.notify_all();
}

slot_pool::statistics slot_pool::collected() const {
    const std::lock_guard lock(mutex_);
    statistics result = statistics_;
    const auto until = times_.now();
    result.waits = times_.waits();
    result.consumer_wait = times_.consumer_wait(until);
    // slots delivered again come before slots leased after them
    if (!delivered_.empty()) {
        result.reached = std::min(result.reached, std::optional(delivered_.front()->scheduled.begin));
    }
    result.wall = times_.wall(until);
    result.lost_slots = lost_;
    return result;
}

}  // namespace pinflow::detail
