#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "loader/array_transfer.hpp"
#include "loader/file_checks.hpp"
#include "loader/schedule.hpp"
#include "loader/slot_group.hpp"
#include "loader/slots.hpp"
#include "loader/stage_seam.hpp"
#include "loader/staging_buffers.hpp"
#include "pinflow/loader/sampler.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// The work of a loader as a state machine: groups of slots pass the stages sample, fill and deliver. It has
/// no threads of its own and never waits for the consumer. One thread can run it, and several can share it.
///
///     free slots --take, sample--> row ids --fill--> rows staged, copies listed --deliver--> announced
///
/// Rows that pass through staging buffers are copied in the stage fill, as soon as a buffer is filled.
///
/// One thread at a time takes slots, and one delivers, both in the order of the batches. Groups are sampled
/// and filled in parallel. An exception of a batch stays with its slot, so that it reaches the consumer in
/// order. `begin` and `take` can also throw.
class stages {
 public:
    /// The objects that the stages use. All must outlive the stages.
    struct parts {
        slot_pool& pool;
        const schedule& order;
        const pinflow::sampler& sampler;
        std::span<const std::unique_ptr<array_transfer>> transfers;
        file_checks& checks;
        std::shared_ptr<const device_held> held;  ///< null if there are none
        staging_buffers* buffers = nullptr;       ///< null if no array's rows pass through them
    };
    /// @param max_groups the most groups that are in the stages at the same time
    stages(const parts& what, std::size_t max_groups);

    /// Prepares the transfers, before the first batch.
    /// @throws as row_source::read_rows, for arrays that are held; device_error or system_failure if there is
    /// no memory for them; what the `memory_resource` throws.
    void begin();

    /// Takes `count` free slots, or fewer if fewer batches are left, for the next batches.
    /// @return null if there are not enough free slots, no batches left, `max_groups` groups in the stages,
    /// or if an error was delivered.
    /// @throws device_error if asking for free slots fails.
    slot_group* take(std::size_t count);
    /// Writes the row ids of the group's batches, with several threads if there are many.
    void sample(slot_group& group) const;
    /// Does the CPU's part of bringing rows to the slots.
    void fill(slot_group& group);
    /// Enqueues the device's part, and hands the slots to the consumer. The group may then be reused.
    void deliver(slot_group& group);

    /// Whether there are batches left to take.
    bool more_batches() const noexcept { return next_batch_ < what_.order.batch_count(); }
    std::size_t max_groups() const noexcept { return groups_.size(); }

    /// Runs one stage of one group, for use by one thread: delivers the oldest group if it is filled,
    /// otherwise fills the oldest sampled group, otherwise takes and samples one.
    /// @return false if there is nothing to do.
    bool run_one(std::size_t count);

 private:
    /// The streams of copies. Groups are copied one after the other on `first`, which is faster than side by
    /// side. On a GPU, `second` may take half of a group's copies, enqueued by another thread.
    struct copy_streams {
        explicit copy_streams(const pinflow::device& device)
            : first(device), second_done(device), done(device) {
            if (device.kind() != device_kind::host) second.emplace(device);
        }
        stream first;
        std::optional<stream> second;
        event second_done;
        event done;  ///< the copies of the group that is being enqueued
    };

    slot_group* take_group();
    void give_back(slot_group& group);

    template <typename Work>
    void run(stage where, slot& slot, Work work) noexcept;
    static void set_error(slot_group& group, std::exception_ptr error) noexcept;
    void begin_read(const slot& slot);
    void begin_batch(slot& slot) const;
    void prepare(slot& slot, slot_group& group);
    void show_arrays(slot& slot) const;
    void check_files(slot_group& group);
    /// Notes that the batches of a group are filled.
    /// @return the slots that completed an epoch: all of its batches are filled now.
    std::vector<slot*> end_reads(slot_group& group);
    void enqueue(std::span<slot* const> slots, slot_group& group);
    bool enqueue_lists(std::span<slot* const> slots);
    void enqueue_copies(std::span<const copy_range> copies);
    bool is_behind() const;

    parts what_;
    std::uint64_t next_batch_ = 0;   ///< number of the next batch to take, over all epochs
    std::uint64_t next_stream_ = 0;  ///< groups alternate streams, so that kernels of two groups overlap
    data_marks marks_;
    static constexpr std::size_t watched_groups = 2;
    /// Of the last groups, the oldest first.
    std::array<std::shared_ptr<const data_mark>, watched_groups> last_marks_;
    // destroyed before marks_ and what_: their destructors wait for the enqueued work
    copy_streams copies_;
    std::array<stream, 2> kernels_;  ///< for kernels that gather rows
    stream lists_;                   ///< see array_transfer::enqueue_lists
    event lists_done_;               ///< the lists of the group that is being enqueued
    /// The batches of an epoch between `take` and the end of `fill`.
    struct epoch_reads {
        std::uint64_t epoch = 0;
        std::uint64_t batch_count = 0;
        bool all_taken = false;
    };
    std::vector<std::unique_ptr<slot_group>> groups_;  ///< unchanged after construction
    /// Groups that `run_one` has begun, the oldest first. Used only by the thread that calls `run_one`.
    std::vector<slot_group*> begun_;
    std::mutex mutex_;  ///< guards reads_ and idle_
    std::vector<epoch_reads> reads_;
    std::vector<slot_group*> idle_;
};

}  // namespace pinflow::detail
