#include "src/core/worker_threads.hpp"

#include <fmt/format.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

/// Kept back for threads that are not workers: those of streams, loaders and the CUDA driver. On the host
/// device, `pinflow stream` has nine: the loader's driver and eight streams.
constexpr unsigned spare_threads = 12;
/// More than oneTBB gives its workers (4 MiB).
constexpr std::uint64_t trial_stack_bytes = std::uint64_t{8} << 20;
/// What the C library reserves when a thread first allocates (HEAP_MAX_SIZE of glibc on 64 bits).
constexpr std::uint64_t thread_heap_bytes = std::uint64_t{64} << 20;

unsigned core_count() {
    return static_cast<unsigned>(tbb::info::default_concurrency());
}

unsigned allowed_count() {
    return static_cast<unsigned>(
        tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism));
}

/// How many threads, with their heaps, fit into the address space if that is limited.
unsigned fitting_threads() {
    const auto limit_bytes = system::max_address_bytes();
    constexpr std::uint64_t max_count = 1 << 20;
    if (!limit_bytes) return max_count;
    const std::uint64_t left_bytes = *limit_bytes - std::min(*limit_bytes, own_address_bytes());
    return static_cast<unsigned>(std::min(left_bytes / (trial_stack_bytes + thread_heap_bytes), max_count));
}

/// A barrier for newly started workers. It holds each one, so that every task gets a worker of its own.
class start_barrier {
 public:
    void begin(unsigned count) {
        const std::lock_guard lock(mutex_);
        missing_count_ = count;
        is_closed_ = false;
    }
    /// Returns at once if the barrier is closed: a worker may start late.
    void arrive_and_wait() {
        std::unique_lock lock(mutex_);
        if (is_closed_) return;
        if (missing_count_ > 0) --missing_count_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return missing_count_ == 0 || is_closed_; });
    }
    /// Waits at most 200 ms: other work may keep the workers busy.
    void wait() {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, std::chrono::milliseconds(200), [&] { return missing_count_ == 0; });
    }
    void close() {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
        changed_.notify_all();
    }

 private:
    std::mutex mutex_;
    std::condition_variable changed_;
    unsigned missing_count_ = 0;
    bool is_closed_ = true;
};

/// The workers of this process.
class worker_pool {
 public:
    static worker_pool& process() {
        static worker_pool& pool = *new worker_pool;  // never destroyed: a worker may start late
        return pool;
    }

    bool is_forked() const noexcept { return ::getpid() != owner_; }

    /// Starts workers until one thread per core can run, the calling one included. On the first call only.
    void start_for_cores() {
        if (has_tried_.load(std::memory_order_acquire)) return;
        start(core_count());
        has_tried_.store(true, std::memory_order_release);
    }

    /// Starts workers until `wanted` threads, the calling one included, can run. @return how many of them
    /// can.
    unsigned start(unsigned wanted) {
        if (is_forked()) return 1;  // the workers are the parent's
        if (wanted <= count_.load(std::memory_order_acquire)) return wanted;
        const std::lock_guard lock(mutex_);
        const unsigned before = count_.load(std::memory_order_relaxed);
        if (wanted <= before) return wanted;
        const unsigned startable = system::count_startable_threads(
            std::min(wanted - before + spare_threads, fitting_threads()), trial_stack_bytes);
        const unsigned usable = startable - std::min(startable, spare_threads);
        const unsigned count = before + std::min(wanted - before, usable);
        constexpr auto limit = tbb::global_control::max_allowed_parallelism;
        std::optional<tbb::global_control> during;
        if (count > core_count()) during.emplace(limit, count);
        // the new control exists before the old one is destroyed: oneTBB applies the smallest of all
        const bool is_bounded = count < core_count() && (count < wanted || bound_ != nullptr);
        bound_ = is_bounded ? std::make_unique<tbb::global_control>(limit, count) : nullptr;
        if (const unsigned allowed = std::min(count, allowed_count()); allowed > before) launch(allowed - 1);
        count_.store(count, std::memory_order_release);
        return count;
    }

 private:
    /// Starts `worker_count` workers. The arena of `keeper_` stays active, so that oneTBB keeps them.
    void launch(unsigned worker_count) {
        if (!keeper_.is_active()) keeper_.initialize(1);
        tbb::task_arena arena(static_cast<int>(worker_count) + 1);
        barrier_.begin(worker_count);
        try {
            for (unsigned i = 0; i < worker_count; ++i)
                arena.enqueue([this] { barrier_.arrive_and_wait(); });
            barrier_.wait();
        } catch (...) {
            barrier_.close();
            throw;
        }
        barrier_.close();
    }

    const ::pid_t owner_ = ::getpid();
    std::mutex mutex_;
    std::atomic<unsigned> count_ = 1;
    tbb::task_arena keeper_;
    start_barrier barrier_;
    std::atomic<bool> has_tried_ = false;
    /// Limits oneTBB to the threads that could be started. Set once fewer than wanted, and fewer than the
    /// cores, could be started.
    std::unique_ptr<tbb::global_control> bound_;
};

}  // namespace

worker_threads::worker_threads(unsigned wanted) {
    constexpr unsigned max_threads = 1024;
    thread_allowance allowed = threads_within_memory(std::min(wanted, max_threads), core_count());
    const unsigned asked = allowed.count;
    reason_ = std::move(allowed.reason);
    count_ = worker_pool::process().start(asked);
    if (count_ < asked) {
        const std::string_view cause =
            worker_pool::process().is_forked()
                ? "oneTBB's threads stayed in the parent process at fork"
                : "the system allows no more beside the 12 that are kept free for other work; raise "
                  "ulimit -u, ulimit -v or the limit of the pids cgroup";
        reason_ = fmt::format("{} of {} threads: {}", count_, asked, cause);
    }
    if (count_ > core_count()) {
        raised_ = std::make_shared<tbb::global_control>(tbb::global_control::max_allowed_parallelism, count_);
        count_ = std::min(count_, allowed_count());
        if (reason_.empty() && count_ < asked)
            reason_ =
                fmt::format("{} of {} threads: oneTBB is allowed no more in this process", count_, asked);
    }
}

void start_worker_threads() {
    worker_pool::process().start_for_cores();
}

void run_in_parallel(std::size_t count, const std::function<void(std::size_t)>& work) {
    if (count <= 1 || worker_pool::process().is_forked()) {
        for (std::size_t i = 0; i < count; ++i)
            work(i);
        return;
    }
    start_worker_threads();
    tbb::task_group_context context(tbb::task_group_context::isolated);
    tbb::this_task_arena::isolate([&] { tbb::parallel_for(std::size_t{0}, count, work, context); });
}

void run_serially(const std::function<void()>& work) {
    if (worker_pool::process().is_forked()) return work();  // a forked process has no workers
    tbb::task_arena alone(1);
    alone.execute(work);
}

}  // namespace pinflow::detail
