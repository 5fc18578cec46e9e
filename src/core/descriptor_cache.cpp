#include "src/core/descriptor_cache.hpp"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <new>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

constexpr std::size_t min_open = 16;
constexpr std::uint64_t max_raised_limit = 65'536;

std::atomic<std::size_t> max_open_of_tests = 0;  // 0: none

thread_local std::chrono::nanoseconds spent_opening{};

/// Adds its lifetime to the thread's time.
class opening_timer {
 public:
    opening_timer() = default;
    opening_timer(const opening_timer&) = delete;
    opening_timer& operator=(const opening_timer&) = delete;
    ~opening_timer() { spent_opening += std::chrono::steady_clock::now() - begin_; }

 private:
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

bool says_too_many(const std::error_code& code) {
    return code == std::errc::too_many_files_open || code == std::errc::too_many_files_open_in_system;
}

}  // namespace

// ---- one descriptor ---------------------------------------------------------------------------------------

cached_descriptor::~cached_descriptor() {
    descriptor_cache::process().close(*this);
}

void cached_descriptor::acquire(const open_function& open) {
    if (acquire_if_open()) return;
    const opening_timer timer;
    descriptor_cache& cache = descriptor_cache::process();
    cache.renew_lock(*this);
    const std::lock_guard lock(opening_);
    if (acquire_if_open()) return;  // another thread has opened it meanwhile
    cache.enter(*this);
    try {
        for (bool opened = false; !opened;) {
            try {
                descriptor_ = open();
                opened = true;
            } catch (const system_failure& failure) {
                if (!says_too_many(failure.code()) || !cache.close_half()) throw;
            }
        }
    } catch (...) {
        cache.forget(*this);
        throw;
    }
    recently_used_.store(true, std::memory_order_relaxed);
    // adds instead of storing: another thread may have incremented the count, and not yet noticed that the
    // descriptor was closed
    state_.fetch_add(is_open + 1, std::memory_order_release);
}

std::chrono::nanoseconds time_spent_opening() noexcept {
    return spent_opening;
}

// ---- all of them ------------------------------------------------------------------------------------------

descriptor_cache& descriptor_cache::process() {
    // never destroyed: files may outlive every other object; not on the heap: the first use may be in a
    // destructor
    alignas(descriptor_cache) static std::byte place[sizeof(descriptor_cache)];
    static descriptor_cache& cache = *::new (static_cast<void*>(place)) descriptor_cache;
    return cache;
}

// If it failed, a forked process may find the lock held.
const int descriptor_cache::fork_handlers = ::pthread_atfork(before_fork, after_fork, after_fork_in_child);

/// Threads of the parent that were opening files do not exist here.
void descriptor_cache::after_fork_in_child() noexcept {
    descriptor_cache& cache = process();
    ++cache.fork_count_;
    for (auto each = cache.entries_.begin(); each != cache.entries_.end();) {
        const auto position = each++;
        if (((*position)->state_.load(std::memory_order_relaxed) & cached_descriptor::is_open) == 0)
            cache.remove(position);
    }
    cache.mutex_.unlock();
}

void descriptor_cache::renew_lock(cached_descriptor& entry) noexcept {
    const std::lock_guard lock(mutex_);
    if (entry.fork_count_ == fork_count_) return;
    entry.fork_count_ = fork_count_;
    ::new (static_cast<void*>(&entry.opening_)) std::mutex;
}

std::size_t descriptor_cache::max_open() {
    if (const std::size_t max_open = max_open_of_tests; max_open > 0) return max_open;
    return std::max<std::uint64_t>(system::max_descriptors() / 2, min_open);
}

void descriptor_cache::enter(cached_descriptor& entry) {
    std::size_t count = 0;
    {
        const std::lock_guard lock(mutex_);
        entry.position_ = entries_.insert(hand_, &entry);  // the hand reaches it last
        entry.is_listed_ = true;
        count = entries_.size();
    }
    std::size_t max_count = max_open();
    if (count > max_count) {
        // half of the limit may stay open, so this allows twice the current count
        system::raise_max_descriptors(std::min(4 * count, max_raised_limit));
        max_count = max_open();
    }
    // close before the new one is opened, so that the bound is exceeded only if more are in use
    while (close_one_beyond(max_count)) {
    }
}

void descriptor_cache::forget(cached_descriptor& entry) noexcept {
    const std::lock_guard lock(mutex_);
    if (entry.is_listed_) remove(entry.position_);
}

void descriptor_cache::close(cached_descriptor& entry) noexcept {
    forget(entry);
    if ((entry.state_.load(std::memory_order_acquire) & cached_descriptor::is_open) != 0)
        system::close(entry.descriptor_);
}

bool descriptor_cache::close_half() noexcept {
    std::size_t max_count = 0;
    {
        const std::lock_guard lock(mutex_);
        max_count = entries_.size() / 2;
    }
    bool closed = false;
    while (close_one_beyond(max_count))
        closed = true;
    return closed;
}

bool descriptor_cache::close_one_beyond(std::size_t max_count) noexcept {
    std::optional<int> closed;
    {
        const std::lock_guard lock(mutex_);
        if (entries_.size() > max_count) closed = evict();
    }
    if (!closed) return false;
    system::close(*closed);
    return true;
}

/// Removes an idle descriptor, one not used recently if there is one. Empty if all are in use.
std::optional<int> descriptor_cache::evict() noexcept {
    // in the second round, recently used descriptors are closed too
    for (std::size_t steps = 2 * entries_.size(); steps > 0; --steps) {
        if (hand_ == entries_.end()) hand_ = entries_.begin();
        cached_descriptor& entry = **hand_;
        const bool spared = entry.recently_used_.exchange(false, std::memory_order_relaxed);
        std::uint32_t idle = cached_descriptor::is_open;
        if (!spared && entry.state_.compare_exchange_strong(idle, 0, std::memory_order_acquire)) {
            const int descriptor = entry.descriptor_;
            remove(hand_);
            return descriptor;
        }
        ++hand_;
    }
    return std::nullopt;
}

void descriptor_cache::remove(std::list<cached_descriptor*>::iterator position) noexcept {
    if (position == hand_) ++hand_;
    (*position)->is_listed_ = false;
    entries_.erase(position);
}

// ---- for tests --------------------------------------------------------------------------------------------

scoped_descriptor_limit::scoped_descriptor_limit(std::size_t max_open) {
    max_open_of_tests = max_open;
}

scoped_descriptor_limit::~scoped_descriptor_limit() {
    max_open_of_tests = 0;
}

}  // namespace pinflow::detail
