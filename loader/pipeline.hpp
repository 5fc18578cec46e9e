#pragma once

#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "loader/route.hpp"
#include "loader/schedule.hpp"
#include "loader/settings.hpp"
#include "loader/slots.hpp"
#include "loader/stage_seam.hpp"
#include "loader/state_origin.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/rows.hpp"

namespace pinflow {

/// What works behind a loader: sample -> gather -> copy -> deliver, as a TBB pipeline whose tokens are slots.
///
/// No stage ever waits for the consumer. A thread of its own, the driver, waits until a slot can be filled
/// and then runs the TBB pipeline for as long as there are such slots; when there are none the pipeline
/// drains, and the driver waits again. So one TBB thread is enough, and none can be stuck in a wait that only
/// itself could end.
class loader::pipeline {
 public:
    pipeline(std::vector<std::shared_ptr<const row_source>> sources, const loader_options& options);
    pipeline(const pipeline&) = delete;
    pipeline& operator=(const pipeline&) = delete;
    /// Stops wherever it is.
    ~pipeline();

    /// The next batch's lease, `with_data` as of slot_pool::lease; null at the end. Throws as loader::next.
    std::unique_ptr<detail::slot_lease> next(bool with_data);

    detail::slot_pool& pool() const noexcept { return *pool_; }
    const pinflow::device& device() const noexcept { return options_.device; }
    std::uint64_t row_count() const noexcept { return sources_[0]->row_count(); }
    const detail::schedule& schedule() const noexcept { return schedule_; }
    loader_report report() const;
    loader_state state() const;

 private:
    void register_pages();
    /// Has the device gather what it can from now on, all pages being registered.
    void begin_device_gathers();
    void drive();
    /// @param while_registering to be left when the registration has ended
    void fill_free_slots(bool while_registering);
    /// The same for batches that the device gathers, all that can be filled at once.
    void fill_together();

    // the stages; an exception stays with its slot, so that it reaches the consumer in its turn
    template <typename Work>
    void run_stage(detail::stage where, detail::slot& slot, Work work) noexcept;
    void sample(detail::slot& slot);
    void gather(detail::slot& slot);
    void copy(detail::slot& slot);
    void check_sources() const;
    bool more_batches() const noexcept { return next_batch_ < schedule_.batch_count(); }
    std::size_t slots_together() const noexcept;
    bool gathered_by_device(std::size_t index) const noexcept;
    /// Enqueues the device's gathers for the batches in all of these slots.
    void gather_on_device(std::span<detail::slot* const> slots);

    /// Rows of a batch that follow each other in it.
    struct row_run {
        std::size_t first;
        std::size_t count;
    };
    /// Lists the copies of those rows of array `index` that lie on registered pages. @return the others.
    std::vector<row_run> list_copies(detail::slot& slot, std::size_t index) const;
    void gather_rows(const detail::slot& slot, std::size_t index, std::span<const row_run> runs,
                     std::byte* destination, std::atomic<std::int64_t>& storage_ns,
                     std::atomic<std::int64_t>& total_ns) const;

    std::vector<std::shared_ptr<const row_source>> sources_;
    loader_options options_;  ///< resolved: with a sampler
    std::shared_ptr<const detail::state_origin> origin_;
    detail::schedule schedule_;
    detail::route_choice route_;
    detail::slot_layout layout_;
    std::uint64_t next_batch_ = 0;  ///< the next to be sampled, over all epochs

    std::shared_ptr<detail::slot_pool> pool_;
    std::vector<bool> from_pages_;       ///< for each array, whether it is copied from its mapped pages
    std::vector<bool> measures_itself_;  ///< for each array, whether its source tells waiting from computing
    std::atomic<std::uint64_t> gathered_bytes_ = 0;  ///< of arrays that are copied from their pages
    std::optional<pinned_pages> pages_;  ///< before the streams, whose copies read them to the end
    std::array<stream, 2>
        streams_;  ///< batches take turns, so that one's copy can begin while another's ends
    /// For each array, what gathers its rows on the device; none before `begin_device_gathers`.
    std::vector<std::optional<row_exchange>> exchanges_;
    std::optional<tbb::global_control> more_threads_;  ///< when more are asked for than there are cores
    tbb::task_arena arena_;
    tbb::task_arena half_arena_;  ///< while pages are registered, which slows down when every core gathers
    std::thread driver_;          // last: it uses everything above
};

}  // namespace pinflow
