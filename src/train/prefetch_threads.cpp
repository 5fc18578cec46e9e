#include "src/train/prefetch_threads.hpp"

#include <unistd.h>

#include <exception>
#include <utility>

#include "src/core/system.hpp"

namespace pinflow::detail {

prefetch_threads::prefetch_threads(std::size_t max_count, work prepare)
    : max_count_(max_count), prepare_(std::move(prepare)), process_(::getpid()) {}

prefetch_threads::~prefetch_threads() {
    if (::getpid() != process_) {  // a forked process has none of the threads
        for (std::thread& thread : threads_)
            thread.detach();
        return;
    }
    {
        const std::scoped_lock lock(mutex_);
        stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_)
        thread.join();
}

bool prefetch_threads::add(table_step& step) {
    if (::getpid() != process_) return false;
    const std::scoped_lock lock(mutex_);
    if (idle_ <= waiting_.size() && threads_.size() < max_count_) {
        try {
            threads_.push_back(system::start_thread("prefetches rows of a table", [this] { run(); }));
        } catch (const std::exception&) {
            if (threads_.empty()) return false;
        }
    }
    waiting_.push_back(&step);
    changed_.notify_one();
    return true;
}

void prefetch_threads::run() {
    row_grouper grouper;
    std::unique_lock lock(mutex_);
    while (true) {
        ++idle_;
        changed_.wait(lock, [&] { return stopped_ || !waiting_.empty(); });
        --idle_;
        if (stopped_) return;
        table_step& step = *waiting_.front();
        waiting_.pop_front();
        lock.unlock();
        prepare_(step, grouper);
        lock.lock();
    }
}

}  // namespace pinflow::detail
