#include "src/train/prefetch_threads.hpp"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "src/core/fork_gate.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

struct prefetch_threads::queue {
    work prepare;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<table_step*> steps;
    std::vector<std::thread> threads;  ///< of the callers of `add`
    std::size_t idle = 0;              ///< threads that wait for a step
    bool stopped = false;
};

prefetch_threads::prefetch_threads(std::size_t max_count, work prepare)
    : max_count_(max_count), process_(::getpid()), queue_(std::make_shared<queue>()) {
    queue_->prepare = std::move(prepare);
    queue_->threads.reserve(max_count);  // a started thread must find room
    watch_forks();
}

prefetch_threads::~prefetch_threads() {
    if (::getpid() != process_) return;  // a forked process has none of the threads
    {
        const std::scoped_lock lock(queue_->mutex);
        queue_->stopped = true;
    }
    queue_->changed.notify_all();
    for (std::thread& thread : queue_->threads)
        thread.join();
}

bool prefetch_threads::add(table_step& step) noexcept {
    try {
        const std::scoped_lock lock(queue_->mutex);
        if (queue_->idle <= queue_->steps.size() && queue_->threads.size() < max_count_) {
            try {
                queue_->threads.push_back(
                    system::start_thread("prefetches rows of a table", [all = queue_] { run(*all); }));
            } catch (const std::exception&) {
                if (queue_->threads.empty()) return false;  // otherwise the running threads prepare it later
            }
        }
        queue_->steps.push_back(&step);
    } catch (const std::exception&) {
        return false;
    }
    queue_->changed.notify_one();
    return true;
}

void prefetch_threads::run(queue& waiting) {
    row_grouper grouper;
    std::unique_lock lock(waiting.mutex);
    while (true) {
        ++waiting.idle;
        waiting.changed.wait(lock, [&] { return waiting.stopped || !waiting.steps.empty(); });
        --waiting.idle;
        if (waiting.stopped) return;
        table_step& step = *waiting.steps.front();
        waiting.steps.pop_front();
        lock.unlock();
        {
            const unforked_section section;
            waiting.prepare(step, grouper);
        }
        lock.lock();
    }
}

}  // namespace pinflow::detail
