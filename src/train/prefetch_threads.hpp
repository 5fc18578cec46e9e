#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>

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
    /// @return false if that is not possible: the system starts no thread, or memory is short.
    bool add(table_step& step) noexcept;

 private:
    struct queue;
    static void run(queue& waiting);

    std::size_t max_count_;
    ::pid_t process_;
    /// Shared with the threads. In a forked process, the missing threads' references keep it alive, so its
    /// condition variable is never destroyed. Destroying it would wait for those threads.
    std::shared_ptr<queue> queue_;
};

}  // namespace pinflow::detail
