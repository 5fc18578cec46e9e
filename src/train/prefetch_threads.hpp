#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "src/train/row_groups.hpp"
#include "src/train/table_step.hpp"

namespace pinflow::detail {

/// The threads on which an embedding table prepares prefetched steps, so that `prefetch` returns at once.
/// They are started by the first steps.
class prefetch_threads {
 public:
    /// Prepares a step with a grouper that only this thread uses. Must not throw.
    using work = std::function<void(table_step& step, row_grouper& grouper)>;

    prefetch_threads(std::size_t max_count, work prepare);
    prefetch_threads(const prefetch_threads&) = delete;
    prefetch_threads& operator=(const prefetch_threads&) = delete;
    /// Waits for the steps that are being prepared. Others are not prepared any more.
    ~prefetch_threads();

    /// Has a thread prepare the step.
    /// @return false if there is none: the system starts no thread, or the process has been forked.
    bool add(table_step& step);

 private:
    void run();

    std::size_t max_count_;
    work prepare_;
    ::pid_t process_;
    std::vector<std::thread> threads_;  // of the thread that calls `add`
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<table_step*> waiting_;
    std::size_t idle_ = 0;  ///< threads that wait for a step
    bool stopped_ = false;
};

}  // namespace pinflow::detail
