#include "loader/slots.hpp"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "loader/pipeline_plan.hpp"
#include "pinflow/error.hpp"
#include "src/device/backend.hpp"

namespace pinflow::detail {

namespace {

/// How long the driver waits for one event of a free slot that is still in use before it checks the slots
/// again, and whether the loader stops.
constexpr std::chrono::microseconds look_again_interval{200};

/// How long a consumer without batches waits for a full group of slots before fewer slots are filled. The
/// device copies a group of small batches in less time.
constexpr std::chrono::microseconds max_group_wait{500};

std::span<const event> marks_of(const slot& slot) {
    return {slot.uses.data(), slot.use_count};
}

bool is_complete(const slot& slot) {
    return slot.data_mark == nullptr || slot.data_mark->done();
}

void wait_until_passed(const slot& slot) noexcept {
    try {
        for (const event& mark : marks_of(slot))
            mark.synchronize();
    } catch (const device_error&) {
        return;  // a failed device no longer reads memory
    }
}

/// Whether the data of a free slot is complete and the streams that read it have passed. Once true, the
/// device is not asked again.
bool has_passed(slot& slot) {
    slot.has_passed =
        slot.has_passed || (is_complete(slot) && std::ranges::all_of(marks_of(slot), &event::done));
    return slot.has_passed;
}

/// Waits for the streams that read the slot, for a limited time.
void wait_for_marks(const slot& slot) {
    for (const event& mark : marks_of(slot)) {
        if (!mark.synchronize_for(look_again_interval)) return;
    }
}

}  // namespace

slot_pool::slot_pool(const slot_sizes& sizes, std::vector<std::shared_ptr<const row_source>> keep_alive,
                     const device_allocator& allocator)
    : device_(allocator.stream.device()),
      owner_(::getpid()),
      keep_alive_(std::move(keep_alive)),
      views_sources_(device_.kind() == device_kind::host && sizes.device_side_bytes == 0),
      awaits_data_(next_waits_for_data(device_.kind(), sizes.max_group_slots * sizes.device_side_bytes)),
      // On the host, the memory of the slot freed last is still in the CPU's cache. On a GPU, the consumer's
      // streams may still be reading that slot.
      takes_last_(device_.kind() == device_kind::host),
      host_sides_(sizes.count * sizes.host_side_bytes, device_),
      device_sides_(allocator.allocate(sizes.count * sizes.device_side_bytes)) {
    const auto side_of = [](std::byte* sides, std::uint64_t size_bytes, unsigned index) {
        return size_bytes == 0 ? nullptr : sides + index * size_bytes;
    };
    for (unsigned i = 0; i < sizes.count; ++i) {
        auto made = std::make_unique<slot>();
        made->index = i;
        made->host_side = side_of(host_sides_.data(), sizes.host_side_bytes, i);
        made->device_side = side_of(device_sides_.data(), sizes.device_side_bytes, i);
        made->uses.emplace_back(device_);  // most batches are read on one stream
        free_.push_back(made.get());
        slots_.push_back(std::move(made));
    }
}

slot_pool::~slot_pool() {
    std::size_t mark_count = 0;
    for (const auto& slot : slots_)
        mark_count += slot->use_count;
    std::vector<event> marks;
    try {
        marks.reserve(mark_count);
        for (const auto& slot : slots_) {
            const auto end = slot->uses.begin() + static_cast<std::ptrdiff_t>(slot->use_count);
            std::move(slot->uses.begin(), end, std::back_inserter(marks));
        }
        device_sides_.release_after(marks);
    } catch (const std::bad_alloc&) {
        for (const auto& slot : slots_)
            wait_until_passed(*slot);
    }
}

bool slot_pool::forked() const noexcept {
    return ::getpid() != owner_;
}

void slot_pool::keep_sources_on(stream_view stream) const {
    if (views_sources_) stream.host_function_async([sources = keep_alive_] {});
}

// ---- the pipeline's side ---------------------------------------------------------------------------------

std::vector<slot*> slot_pool::candidates() const {
    return takes_last_ ? std::vector<slot*>(free_.rbegin(), free_.rend())
                       : std::vector<slot*>(free_.begin(), free_.end());
}

void slot_pool::wake_driver() noexcept {
    if (wanted_ && (free_.size() >= *wanted_ || consumer_starves())) slot_freed_.notify_one();
}

template <typename Condition>
void slot_pool::await_consumer(std::unique_lock<std::mutex>& lock, std::size_t wanted, Condition is_met) {
    times_.begin_consumer_wait();
    wanted_ = wanted;
    slot_freed_.wait(lock, [&] { return stopped_ || is_met(); });
    wanted_.reset();
    times_.end_consumer_wait();
}

std::size_t slot_pool::wait_for_free(std::size_t together) {
    std::optional<wait_times::clock::time_point> first_passed;
    for (;;) {
        std::unique_lock lock(mutex_);
        const auto has_candidates = [&] {
            return free_.size() >= together || (!free_.empty() && consumer_starves());
        };
        if (!has_candidates() && !stopped_) await_consumer(lock, together, has_candidates);
        if (stopped_) return 0;
        const std::vector<slot*> given_back = candidates();
        const auto before = times_.now();
        lock.unlock();
        // each slot is checked once, and no more slots than needed, because a check queries the device
        std::size_t passed = 0;
        slot* not_passed = nullptr;
        for (slot* const each : given_back) {
            if (passed >= together) break;
            if (has_passed(*each)) {
                ++passed;
            } else if (not_passed == nullptr) {
                not_passed = each;
            }
        }
        if (passed >= together) return together;
        lock.lock();
        if (passed > 0 && consumer_starves()) {
            // A missing slot is still leased, or given back and in use on the device. A slot in use becomes
            // free by itself unless the consumer's streams wait for the consumer. `max_group_wait` covers
            // that case.
            if (!first_passed) first_passed = before.at;
            if (given_back.size() < together || before.at - *first_passed > max_group_wait) return passed;
        }
        if (not_passed == nullptr) {
            // all returned slots can be filled: wait until more are returned or the consumer has nothing left
            if (free_.size() == given_back.size())
                await_consumer(lock, given_back.size() + 1,
                               [&] { return free_.size() != given_back.size() || consumer_starves(); });
            continue;
        }
        lock.unlock();
        // slots mostly pass in this order; if another slot passes first or is returned, the next check finds
        // it
        const bool complete =
            not_passed->data_mark == nullptr || not_passed->data_mark->synchronize_for(look_again_interval);
        if (complete) wait_for_marks(*not_passed);
        lock.lock();
        const auto after = times_.now();
        if (complete) {
            times_.add_consumer_wait(before, after);
        } else {
            times_.add_link_wait(before, after);
        }
    }
}

std::vector<slot*> slot_pool::take_free(std::size_t count) {
    std::unique_lock lock(mutex_);
    if (stopped_ || free_.size() < count) return {};
    const std::vector<slot*> given_back = candidates();
    lock.unlock();
    std::vector<slot*> taken;
    for (slot* const each : given_back) {
        if (taken.size() == count) break;
        if (has_passed(*each)) taken.push_back(each);
    }
    if (taken.size() < count) return {};
    for (slot* const each : taken) {
        each->use_count = 0;
        each->has_passed = false;
        each->taken = true;
        each->data_mark = nullptr;
        each->error = nullptr;
        each->times = {};
    }
    lock.lock();
    std::erase_if(free_, [](slot* each) { return std::exchange(each->taken, false); });
    filling_ += taken.size();
    // the driver's wait for copies is charged to the first slot
    taken.front()->times.link = times_.take_link_wait();
    return taken;
}

void slot_pool::deliver(std::span<slot* const> filled) {
    {
        const std::lock_guard lock(mutex_);
        filling_ -= filled.size();
        for (slot* const each : filled) {
            if (failed_ || stopped_) {
                free_.push_back(each);
            } else if (each->error) {
                failed_ = finished_ = true;
                error_ = std::exchange(each->error, nullptr);
                free_.push_back(each);
            } else {
                delivered_.push_back(each);
                finished_ = finished_ || each->last;
            }
        }
    }
    slot_delivered_.notify_all();
}

void slot_pool::finish(std::exception_ptr error) {
    {
        const std::lock_guard lock(mutex_);
        finished_ = true;
        if (error && !failed_) {
            failed_ = true;
            error_ = std::move(error);
        }
        if (!delivered_.empty()) times_.begin_consumer_wait();
    }
    slot_delivered_.notify_all();
}

void slot_pool::stop() noexcept {
    {
        const std::lock_guard lock(mutex_);
        stopped_ = finished_ = true;
    }
    slot_freed_.notify_all();
    slot_delivered_.notify_all();
}

bool slot_pool::stopped() const noexcept {
    const std::lock_guard lock(mutex_);
    return stopped_;
}

bool slot_pool::failed() const noexcept {
    const std::lock_guard lock(mutex_);
    return failed_;
}

}  // namespace pinflow::detail
