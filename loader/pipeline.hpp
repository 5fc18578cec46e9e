#pragma once

#include <tbb/task_arena.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "loader/array_transfer.hpp"
#include "loader/file_checks.hpp"
#include "loader/schedule.hpp"
#include "loader/settings.hpp"
#include "loader/slot_lease.hpp"
#include "loader/slots.hpp"
#include "loader/stages.hpp"
#include "loader/state_origin.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow {

/// Runs a loader: its stages and the threads that run them.
///
/// No stage ever waits for the consumer. A separate thread, the driver, waits until slots can be filled. It
/// then runs the stages as a TBB pipeline until too few slots can be filled, or another number of threads is
/// wanted. Then the pipeline drains, and the driver waits again. So one TBB thread is enough, and no TBB
/// thread can deadlock by waiting for itself.
class loader::pipeline {
 public:
    /// @throws as the constructor of loader.
    pipeline(std::vector<std::shared_ptr<const row_source>> sources, const loader_options& options);
    pipeline(const pipeline&) = delete;
    pipeline& operator=(const pipeline&) = delete;
    /// Stops the pipeline in any state.
    ~pipeline();

    /// Leases the next batch.
    /// @return null at the end.
    /// @throws as loader::next.
    std::shared_ptr<detail::slot_lease> next(detail::lease_when when);
    /// As loader::wait_for.
    bool wait_for(std::chrono::nanoseconds timeout);

    detail::slot_pool& pool() const noexcept { return *pool_; }
    const pinflow::device& device() const noexcept { return options_.device; }
    std::uint64_t row_count() const noexcept { return options_.sampler->row_count(); }
    const detail::schedule& schedule() const noexcept { return schedule_; }
    loader_report report() const;
    loader_state state() const;

 private:
    void refuse_forked() const;
    void plan(std::vector<std::shared_ptr<const row_source>> sources);
    void drive();
    /// Fills `first_count` slots, then whole groups, until too few slots can be filled, no batches are left,
    /// or another number of threads is wanted.
    void run_stages(std::size_t first_count);
    /// The number of threads that the stages need now.
    unsigned wanted_threads() const noexcept;

    loader_options options_;  ///< resolved: with a sampler
    std::shared_ptr<const detail::state_origin> origin_;
    detail::schedule schedule_;
    detail::worker_threads workers_;
    tbb::task_arena arena_;

    std::uint64_t slot_bytes_ = 0;    ///< as loader_report's
    std::size_t group_size_ = 1;      ///< batches that are filled together
    bool is_in_order_ = false;        ///< as work_facts
    std::uint64_t sample_bytes_ = 0;  ///< as work_facts
    std::string slots_reason_;        ///< as loader_report's
    std::shared_ptr<detail::slot_pool> pool_;
    std::vector<std::unique_ptr<detail::array_transfer>> transfers_;
    detail::file_checks checks_;
    std::optional<detail::staging_buffers> buffers_;
    std::optional<detail::stages> stages_;  ///< its streams finish their copies before members above go
    std::thread driver_;                    // last: it uses everything above
};

}  // namespace pinflow
