#include "loader/slots.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <utility>

#include "pinflow/error.hpp"

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// From here on a consumer's thread waits for the data of a batch, and not its stream alone: one that waits
/// on a GPU asks again and again across the link that the data comes by, but asking for each of many small
/// batches costs the thread more than that (measured: samples/bench/RESULTS.md).
constexpr std::uint64_t least_awaited_bytes = std::uint64_t{8} << 20;

/// How long the driver waits for the slot that was given back first before it looks at the others, and
/// whether the loader stops.
constexpr std::chrono::microseconds look_again_interval{200};

/// How long a consumer waits for data before it looks whether that is still the next batch's: another
/// consumer may have taken that slot, and it may have been filled again.
constexpr std::chrono::microseconds data_look_interval{2000};

std::span<const event> marks_of(const slot& slot) {
    return {slot.passed.data(), slot.passed_count};
}

/// Whether the copy into the slot and the streams that read it have finished.
bool has_passed(const slot& slot) {
    return slot.ready.done() &&
           std::ranges::all_of(marks_of(slot), [](const event& mark) { return mark.done(); });
}

/// Waits for the streams that read the slot, a while at most.
void wait_for_marks(const slot& slot) {
    for (const event& mark : marks_of(slot)) {
        if (!mark.synchronize_for(look_again_interval)) return;
    }
}

}  // namespace

slot_pool::slot_pool(const pinflow::device& device, unsigned slot_count, std::uint64_t host_side_bytes,
                     std::uint64_t device_side_bytes,
                     std::vector<std::shared_ptr<const row_source>> keep_alive)
    : device_(device),
      owner_(::getpid()),
      keep_alive_(std::move(keep_alive)),
      views_sources_(device_side_bytes == 0),
      awaits_data_(device.kind() != device_kind::host && device_side_bytes >= least_awaited_bytes) {
    const stream allocation_stream(device_);
    for (unsigned i = 0; i < slot_count; ++i) {
        auto made = std::make_unique<slot>(device_);
        made->host_side = pinned_buffer(host_side_bytes, device_);
        made->device_side = device_buffer(device_side_bytes, allocation_stream);
        free_.push_back(made.get());
        slots_.push_back(std::move(made));
    }
    allocation_stream.synchronize();  // from here on, any stream may use the memory
}

slot_pool::~slot_pool() {
    for (const auto& slot : slots_) {
        slot->device_side.release_after(marks_of(*slot));
    }
}

bool slot_pool::forked() const noexcept {
    return ::getpid() != owner_;
}

void slot_pool::keep_sources_on(stream_view stream) const {
    if (views_sources_) stream.host_function_async([sources = keep_alive_] {});
}

std::chrono::nanoseconds slot_pool::since_asked(clock::time_point before, clock::time_point until) const {
    if (!first_asked_) return {};
    return std::max(until - std::max(before, *first_asked_), clock::duration{});
}

slot_pool::moment slot_pool::now() const {
    // the clock is read once for both, and for all that is reckoned from them: a thread may be held up
    // between two readings
    const auto at = clock::now();
    return {at, data_awaited_ + (data_waiters_ > 0 ? at - data_awaited_since_ : clock::duration{})};
}

std::chrono::nanoseconds slot_pool::consumer_time(const moment& before, const moment& until) const {
    return std::max(since_asked(before.at, until.at) - (until.data_awaited - before.data_awaited),
                    std::chrono::nanoseconds{});
}

template <typename Ready>
void slot_pool::await_consumer(std::unique_lock<std::mutex>& lock, Ready ready) {
    consumer_awaited_since_ = now();
    freed_.wait(lock, ready);
    end_wait_for_consumer();
}

void slot_pool::end_wait_for_consumer() {
    if (!consumer_awaited_since_) return;
    statistics_.consumer_wait += consumer_time(*consumer_awaited_since_, now());
    consumer_awaited_since_.reset();
}

std::chrono::nanoseconds slot_pool::consumer_wait(const moment& until) const {
    return statistics_.consumer_wait +
           (consumer_awaited_since_ ? consumer_time(*consumer_awaited_since_, until) : clock::duration{});
}

std::chrono::nanoseconds slot_pool::await_data(std::unique_lock<std::mutex>& lock, const event& ready) {
    const auto before = clock::now();
    if (data_waiters_++ == 0) data_awaited_since_ = before;
    if (!consumer_has_some()) freed_.notify_one();
    const auto stop_waiting = [&] {
        const auto after = clock::now();
        data_awaited_ += after - data_awaited_since_;
        data_awaited_since_ = after;
        --data_waiters_;
        return after - before;
    };
    lock.unlock();
    try {
        ready.synchronize_for(data_look_interval);
    } catch (...) {
        lock.lock();
        stop_waiting();
        throw;
    }
    lock.lock();
    return stop_waiting();
}

bool slot_pool::wait_for_free(std::size_t together) {
    for (;;) {
        std::unique_lock lock(mutex_);
        if (free_.empty() && !stopped_) await_consumer(lock, [&] { return stopped_ || !free_.empty(); });
        if (stopped_) return false;
        const std::vector<slot*> candidates(free_.begin(), free_.end());
        const bool some_delivered = consumer_has_some();
        const moment before = now();
        lock.unlock();
        // each is asked for once, and no more than are needed: it is a call of the driver
        std::size_t passed = 0;
        slot* not_passed = nullptr;
        for (slot* const each : candidates) {
            if (passed >= together) break;
            if (has_passed(*each)) {
                ++passed;
            } else if (not_passed == nullptr) {
                not_passed = each;
            }
        }
        if (passed >= together || (passed > 0 && !some_delivered)) return true;
        if (not_passed == nullptr) {
            // all that were given back can be filled: more come, or the consumer takes the last delivered one
            lock.lock();
            await_consumer(
                lock, [&] { return stopped_ || free_.size() != candidates.size() || !consumer_has_some(); });
            continue;
        }
        // they mostly pass in this order; when another one passes first, or is given back, the next look
        // finds it
        const bool complete = not_passed->ready.synchronize_for(look_again_interval);
        if (complete) wait_for_marks(*not_passed);
        lock.lock();
        const moment after = now();
        if (complete) {
            statistics_.consumer_wait += consumer_time(before, after);
        } else {
            link_waited_ += since_asked(before.at, after.at);
        }
    }
}

slot* slot_pool::take_free() {
    const std::lock_guard lock(mutex_);
    if (stopped_) return nullptr;
    const auto found = std::ranges::find_if(free_, [](const slot* slot) { return has_passed(*slot); });
    if (found == free_.end()) return nullptr;
    slot* const next = *found;
    free_.erase(found);
    next->passed_count = 0;
    next->error = nullptr;
    next->times = {};
    // the driver stood still for the sake of this slot
    next->times.link = std::exchange(link_waited_, {});
    return next;
}

void slot_pool::deliver(slot& filled) {
    {
        const std::lock_guard lock(mutex_);
        if (failed_ || stopped_) {
            free_.push_back(&filled);
        } else if (filled.error) {
            failed_ = finished_ = true;
            error_ = std::exchange(filled.error, nullptr);
            free_.push_back(&filled);
        } else {
            ready_.push_back(&filled);
            finished_ = finished_ || filled.last;
        }
    }
    delivered_.notify_all();
}

void slot_pool::finish(std::exception_ptr error) {
    {
        const std::lock_guard lock(mutex_);
        finished_ = true;
        if (error && !failed_) {
            failed_ = true;
            error_ = std::move(error);
        }
        if (!ready_.empty()) consumer_awaited_since_ = now();
    }
    delivered_.notify_all();
}

void slot_pool::stop() noexcept {
    {
        const std::lock_guard lock(mutex_);
        stopped_ = finished_ = true;
    }
    freed_.notify_all();
    delivered_.notify_all();
}

bool slot_pool::stopped() const noexcept {
    const std::lock_guard lock(mutex_);
    return stopped_;
}

bool slot_pool::failed() const noexcept {
    const std::lock_guard lock(mutex_);
    return failed_;
}

std::uint64_t slot_pool::count_ready() const {
    if (!awaits_data_) return ready_.size();
    // those before the first one that is still on its way: batches may take turns on two streams
    const auto first_awaited =
        std::ranges::find_if(ready_, [](const slot* slot) { return !slot->ready.done(); });
    return static_cast<std::uint64_t>(first_awaited - ready_.begin());
}

slot* slot_pool::lease(bool with_data) {
    with_data = with_data || awaits_data_;
    std::unique_lock lock(mutex_);
    const moment before = now();
    if (!first_asked_) first_asked_ = before.at;
    const std::uint64_t ready_before = count_ready();
    const std::chrono::nanoseconds consumer_wait_before = consumer_wait(before);
    std::chrono::nanoseconds data_wait{};
    for (;;) {
        delivered_.wait(lock, [&] { return !ready_.empty() || finished_ || leased_ == slots_.size(); });
        if (ready_.empty() || !with_data || ready_.front()->ready.done()) break;
        data_wait += await_data(lock, ready_.front()->ready);
    }
    if (!ready_.empty()) {
        slot* const next = ready_.front();
        ready_.pop_front();
        ++leased_;
        next->ready_before = ready_before;
        ++statistics_.batches;
        statistics_.rows += next->row_ids.size();
        statistics_.ready += ready_before;
        statistics_.most_ready = std::max(statistics_.most_ready, ready_before);
        statistics_.reached = std::max(statistics_.reached, std::optional(next->step.end));
        statistics_.waits.link += data_wait;
        // while the loader waits for the consumer's streams, the consumer waits for nobody but itself
        const moment after = now();
        const std::chrono::nanoseconds waited = after.at - before.at - data_wait;
        blame(next->times, std::max(waited - (consumer_wait(after) - consumer_wait_before), {}));
        if (ready_.empty() && finished_) end_wait_for_consumer();
        // who waits for a batch while the last slot is taken by somebody else would wait for ever
        if (leased_ == slots_.size()) delivered_.notify_all();
        if (!consumer_has_some()) freed_.notify_one();
        return next;
    }
    if (finished_ && !ended_at_) ended_at_ = clock::now();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (finished_) {
        statistics_.ended = !failed_ && !stopped_;
        return nullptr;
    }
    throw all_slots_leased(
        fmt::format("there is no slot left for another batch: all {} are held by the consumer; release "
                    "batches, or give the loader more slots",
                    slots_.size()));
}

void slot_pool::end_lease(slot& leased) noexcept {
    {
        const std::lock_guard lock(mutex_);
        --leased_;
        free_.push_back(&leased);
    }
    freed_.notify_one();
}

void slot_pool::undo_lease(slot& leased) {
    {
        const std::lock_guard lock(mutex_);
        // others may have leased what follows it, and may undo that, too
        ready_.insert(
            std::ranges::find_if(ready_, [&](const slot* other) { return other->number > leased.number; }),
            &leased);
        --leased_;
        --statistics_.batches;
        statistics_.rows -= leased.row_ids.size();
        statistics_.ready -= leased.ready_before;
        statistics_.ended = false;
        ended_at_.reset();
    }
    delivered_.notify_all();
}

slot_pool::statistics slot_pool::collected() const {
    const std::lock_guard lock(mutex_);
    statistics result = statistics_;
    const moment until = now();
    result.consumer_wait = consumer_wait(until);
    // slots that come again are before what was leased after them
    if (!ready_.empty()) {
        result.reached = std::min(result.reached, std::optional(ready_.front()->step.begin));
    }
    if (first_asked_) result.wall = ended_at_.value_or(until.at) - *first_asked_;
    return result;
}

void slot_pool::blame(const batch_times& costs, std::chrono::nanoseconds waited) {
    using seconds = std::chrono::duration<double>;
    const double total = seconds(costs.storage + costs.cpu + costs.link).count();
    const auto share = [&](std::chrono::nanoseconds cost) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(waited * (seconds(cost).count() / total));
    };
    if (total <= 0) {
        statistics_.waits.cpu += waited;
        return;
    }
    statistics_.waits.storage += share(costs.storage);
    statistics_.waits.cpu += share(costs.cpu);
    statistics_.waits.link += share(costs.link);
}

slot_lease::~slot_lease() {
    if (pool_->forked()) {
        static_cast<void>(new std::shared_ptr<slot_pool>(std::move(pool_)));  // left as it is, on purpose
        return;
    }
    if (slot_ == nullptr) return;
    for (const stream_view& stream : streams_) {
        try {
            if (slot_->passed.size() == slot_->passed_count) slot_->passed.emplace_back(pool_->device());
            pool_->keep_sources_on(stream);
            slot_->passed[slot_->passed_count].record(stream);
            ++slot_->passed_count;
        } catch (...) {
            // without a mark the only safe way is to wait; when even that fails the device is gone, and reads
            // nothing
            try {
                stream.synchronize();
            } catch (...) {
                continue;
            }
        }
    }
    pool_->end_lease(*slot_);
}

void slot_lease::use_on(stream_view stream) {
    if (stream.device() != pool_->device()) {
        throw invalid_argument(fmt::format("a batch on {} cannot be used on a stream of {}",
                                           pool_->device().name(), stream.device().name()));
    }
    stream.wait(slot_->ready);
    const bool known = std::ranges::any_of(
        streams_, [&](const stream_view& other) { return other.native_handle() == stream.native_handle(); });
    if (!known) streams_.push_back(stream);
}

void slot_lease::undo() {
    pool_->undo_lease(*slot_);
    slot_ = nullptr;
}

loader_state slot_lease::state() const {
    if (pool_->forked()) {
        throw device_error(
            "the state of a batch cannot be asked for in a forked process: its loader is the parent's");
    }
    return origin_->state_at(slot_->step.end);
}

}  // namespace pinflow::detail
