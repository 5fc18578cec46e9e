#pragma once

#include <tbb/task_arena.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pinflow/pin.hpp"
#include "pinflow/rows.hpp"
#include "src/core/worker_threads.hpp"
#include "src/rows/call_transfer.hpp"
#include "src/rows/calls_in_flight.hpp"
#include "src/rows/exchange_setup.hpp"
#include "src/rows/row_call.hpp"
#include "src/rows/staging.hpp"
#include "src/rows/stream_locks.hpp"

namespace pinflow::detail {

/// Implements row_exchange: plans calls, and has the transfers of their plans enqueue them. Thread-safe.
/// Calls on one stream are enqueued one after the other. While a call enqueues on the caller's stream, whose
/// queue may be full, it holds only the lock of that stream and, if it stages rows, a staging ring.
class exchange_state {
 public:
    exchange_state(row_table table, pinflow::device device, const row_exchange_options& options);
    exchange_state(const exchange_state&) = delete;
    exchange_state& operator=(const exchange_state&) = delete;
    /// Waits until the streams have passed all calls.
    ~exchange_state() { calls_->close(); }

    /// The calls of a request that can have errors found after `enqueue` has returned.
    using pending_calls = std::vector<std::shared_ptr<pending_call>>;
    /// Enqueues batches, as several calls if they do not fit into one.
    pending_calls enqueue(const call_request& request);
    /// Enqueues one batch of up to 2^32 - 1 rows, waits for it, and throws its error.
    void run(row_direction direction, const row_batch& only, duplicate_policy policy);
    /// The plan for `batches` batches of `batch_rows` rows, with the number of batches worth moving together.
    row_plan plan(row_direction direction, std::uint64_t batch_rows, unsigned batches) const;
    /// Measures plans for groups of 1, 2, 4, ... up to `batches` batches of `batch_rows` rows.
    void tune(std::uint64_t batch_rows, unsigned batches);
    /// Throws the oldest error of a call that has ended, or data_changed if the table's file has changed.
    void check();
    /// What the handles of calls share with the exchange.
    const std::shared_ptr<calls_in_flight>& calls() const noexcept { return calls_; }

    const row_table& table() const noexcept { return setup_.table; }
    const pinflow::device& device() const noexcept { return setup_.device; }
    bool is_in_place() const noexcept { return setup_.not_reached_reason.empty(); }
    std::uint64_t staging_buffer_bytes() const noexcept { return setup_.staging_buffer_bytes(); }

 private:
    void page_lock();
    void check_source() const;
    rated_plan plan_of(const call_kind& call) const;
    bool may_stage() const;
    void reserve_staging();
    std::vector<call_request> split(const call_request& request, const calls_in_flight& calls) const;
    pending_calls enqueue(const call_request& request, calls_in_flight& calls,
                          const transfer_plan* plan = nullptr);
    void enqueue(row_call& call, transfer_plan plan);
    call_transfer& transfer_of(const transfer_part& part) const;

    exchange_setup setup_;
    std::optional<pinned_pages> pages_;
    std::shared_ptr<calls_in_flight> calls_;
    worker_threads workers_;
    tbb::task_arena arena_;
    stream own_stream_;  ///< of synchronous calls and measurements
    preparing_stream preparing_;
    stream_locks locks_;
    std::unique_ptr<call_transfer> direct_;  ///< kernels, or the CPU for a file on the host device
    std::unique_ptr<call_transfer> engine_;
    std::unique_ptr<call_transfer> staged_;
    // last: its streams use the members above
    staging_rings rings_;
};

}  // namespace pinflow::detail
