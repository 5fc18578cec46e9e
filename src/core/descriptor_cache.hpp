#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>

namespace pinflow::detail {

/// The descriptor of one file. It may be closed while it is unused, and is reopened for the next use. Uses
/// may begin and end on any thread.
class cached_descriptor {
 public:
    /// Opens the file. @return the descriptor, which the cache will close.
    using open_function = std::function<int()>;

    cached_descriptor() = default;
    cached_descriptor(const cached_descriptor&) = delete;
    cached_descriptor& operator=(const cached_descriptor&) = delete;
    /// Closes the descriptor. All uses must have ended.
    ~cached_descriptor();

    /// Begins a use if the descriptor is open. Takes no lock. @return whether a use has begun.
    bool acquire_if_open() noexcept {
        if ((state_.fetch_add(1, std::memory_order_acquire) & is_open) == 0) {
            state_.fetch_sub(1, std::memory_order_relaxed);
            return false;
        }
        if (!recently_used_.load(std::memory_order_relaxed))
            recently_used_.store(true, std::memory_order_relaxed);
        return true;
    }
    /// Begins a use. If the descriptor is closed, closes others to make room and calls `open`. If the process
    /// or the system has too many open files, closes idle descriptors and calls `open` again.
    /// @throws what `open` throws.
    void acquire(const open_function& open);
    /// Ends a use.
    void release() noexcept { state_.fetch_sub(1, std::memory_order_release); }

    /// The descriptor, during a use.
    int get() const noexcept { return descriptor_; }

 private:
    friend class descriptor_cache;

    static constexpr std::uint32_t is_open = std::uint32_t{1} << 31;

    std::atomic<std::uint32_t> state_ = 0;  // is_open, plus the number of uses
    std::atomic<bool> recently_used_ = false;
    int descriptor_ = -1;
    std::mutex opening_;  // held by the thread that opens it
    // guarded by the cache's lock
    bool is_listed_ = false;                            // open, or being opened
    std::list<cached_descriptor*>::iterator position_;  // in the cache's list, if it is listed
    std::uint64_t fork_count_ = 0;                      // when `opening_` was made
};

/// Total time that the calling thread has spent opening files for a use.
std::chrono::nanoseconds time_spent_opening() noexcept;

/// The open descriptors of all input_files of this process, and the bound on their number: half of
/// RLIMIT_NOFILE, at least 16. When more are needed, the soft limit is raised towards the hard limit, to
/// 65,536 at most. The clock algorithm chooses the descriptor to close: the hand skips descriptors that
/// were used since its last pass. Thread-safe. A forked process has its own copy of the list and of the
/// descriptors.
class descriptor_cache {
 public:
    static descriptor_cache& process();

    /// The maximum number of open descriptors, unless more are in use.
    static std::size_t max_open();

    /// To be called before `opening_` of a descriptor is locked. In a forked process, a thread of the parent
    /// may have held it, so it is made anew.
    void renew_lock(cached_descriptor& entry) noexcept;
    /// Enters a descriptor that is about to be opened, and closes others until the bound holds or all are in
    /// use.
    void enter(cached_descriptor& entry);
    /// Undoes `enter`, for a descriptor that could not be opened.
    void forget(cached_descriptor& entry) noexcept;
    /// Closes the descriptor if it is open. The last call for this descriptor.
    void close(cached_descriptor& entry) noexcept;
    /// Closes half of the descriptors, or fewer if fewer are idle.
    /// @return whether any was closed.
    bool close_half() noexcept;

 private:
    bool close_one_beyond(std::size_t max_count) noexcept;
    std::optional<int> evict() noexcept;
    void remove(std::list<cached_descriptor*>::iterator position) noexcept;

    static void before_fork() noexcept { process().mutex_.lock(); }
    static void after_fork() noexcept { process().mutex_.unlock(); }
    static void after_fork_in_child() noexcept;
    static const int fork_handlers;

    std::mutex mutex_;                                                 // held during a fork
    std::uint64_t fork_count_ = 0;                                     // of this process and its ancestors
    std::list<cached_descriptor*> entries_;                            // open, or being opened
    std::list<cached_descriptor*>::iterator hand_ = entries_.begin();  // the next candidate
};

/// For tests: replaces the bound on open descriptors for its lifetime. Only one may exist at a time.
class scoped_descriptor_limit {
 public:
    explicit scoped_descriptor_limit(std::size_t max_open);
    ~scoped_descriptor_limit();
    scoped_descriptor_limit(const scoped_descriptor_limit&) = delete;
    scoped_descriptor_limit& operator=(const scoped_descriptor_limit&) = delete;
};

}  // namespace pinflow::detail
