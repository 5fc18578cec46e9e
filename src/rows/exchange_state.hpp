#pragma once

#include <tbb/task_arena.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/pin.hpp"
#include "pinflow/rows.hpp"
#include "src/core/worker_threads.hpp"
#include "src/device/backend.hpp"
#include "src/rows/call_errors.hpp"
#include "src/rows/cpu_rows.hpp"
#include "src/rows/scratch.hpp"
#include "src/rows/staging.hpp"
#include "src/rows/stream_locks.hpp"
#include "src/rows/transfer_planner.hpp"

namespace pinflow::detail {

enum class row_direction : std::uint8_t { gather, scatter };

/// Implements row_exchange: enqueues calls on every route. Thread-safe. Calls on one stream are
/// enqueued one after the other. While a call enqueues on the caller's stream, whose queue may be full, it
/// holds the lock of that stream only.
class exchange_state {
 public:
    exchange_state(row_table table, pinflow::device device, const row_exchange_options& options);
    exchange_state(const exchange_state&) = delete;
    exchange_state& operator=(const exchange_state&) = delete;
    /// Waits until the streams have passed all calls.
    ~exchange_state() { errors_->close(); }

    /// The most rows of one call, in all batches that travel together.
    static constexpr std::uint64_t max_rows_of_call = std::numeric_limits<std::uint32_t>::max();

    /// The number of indices that one task copies or checks.
    static constexpr std::size_t ids_of_task = 16384;

    /// One batch, in either direction.
    struct batch {
        row_ids ids;
        std::byte* rows;
    };
    /// Calls with errors that are found later; most have none.
    using pending_calls = std::vector<std::shared_ptr<pending_call>>;
    /// Enqueues batches. If `is_listed`, `check` throws their errors; a handle does anyway.
    pending_calls enqueue(row_direction direction, std::span<const batch> batches, duplicate_policy policy,
                          stream_view stream, bool is_listed = true);
    /// Enqueues one batch, waits for it, and throws its error.
    void run(row_direction direction, const batch& only, duplicate_policy policy);
    /// The plan for `batches` batches of `batch_rows` rows, with the number of batches worth moving together.
    row_plan plan(row_direction direction, std::uint64_t batch_rows, unsigned batches) const;
    /// Measures plans for groups of 1, 2, 4, ... up to `batches` batches of `batch_rows` rows.
    void tune(std::uint64_t batch_rows, unsigned batches);
    /// Throws the errors of calls that have ended, and of the table's file.
    void check();
    /// What the handles of calls share with the exchange.
    const std::shared_ptr<call_errors>& errors() const noexcept { return errors_; }

    const row_table& table() const noexcept { return table_; }
    const pinflow::device& device() const noexcept { return device_; }
    std::uint64_t staging_buffer_bytes() const noexcept;

 private:
    // NOLINTBEGIN(readability-redundant-member-init): g++ warns where an initialiser leaves out others
    /// One call while it is being enqueued. The destructor returns what no stream uses.
    struct row_call {
        row_direction direction;
        std::span<const batch> batches;
        duplicate_policy policy;
        stream_view stream;
        bool is_listed;
        transfer_plan plan{};

        row_parts parts{};
        std::uint64_t count = 0;
        bool ids_on_device = false;  ///< the indices of some batch
        /// The indices of all batches that have them in host memory, contiguous.
        taken_block host_ids{};
        std::uint64_t outside_count = 0;  ///< of these indices, outside the table
        device_scratch scratch{};
        row_transfer transfer{};
        std::shared_ptr<pending_call> errors = nullptr;  ///< null: no error is possible
        staging_rings::taken_ring ring{};                ///< for the staged and hybrid routes
        taken_block sorted_ids{};  ///< indices of the order, in host memory, for the CPU

        const std::uint64_t* ids_in_host_memory() const noexcept {
            return reinterpret_cast<const std::uint64_t*>(host_ids.data());
        }
        bool is_gather() const noexcept { return direction == row_direction::gather; }
        /// Whether the device or the CPU moves the rows in the order of their addresses.
        bool is_sorted() const noexcept { return plan.parts.front().sorted || !is_gather(); }
    };
    // NOLINTEND(readability-redundant-member-init)

    /// @throws unsupported for elements that cannot be added up.
    static sum_type sum_type_of(const dtype& type);

    void page_lock();
    /// Whether the device reads the table in place. If not, `not_reached_reason_` tells why.
    bool reached() const noexcept { return not_reached_reason_.empty(); }
    /// Whether the table lies in a file. If the file is truncated, the CPU faults on the lost pages, even if
    /// they are locked.
    bool is_file_backed() const noexcept;
    int thread_count() const { return arena_.max_concurrency(); }
    call_facts facts_of(row_direction direction, std::uint64_t count, bool host_ids) const;
    rated_plan plan_of(row_direction direction, std::uint64_t count, bool host_ids) const;
    void check_call(row_direction direction, std::span<const batch> batches, duplicate_policy policy,
                    stream_view stream) const;
    void check_apart(row_direction direction, std::span<const batch> batches) const;
    void check_sums(std::span<const batch> batches) const;
    void check_ids(std::span<const row_call> calls) const;
    void check_source() const;
    row_call begin_call(row_direction direction, std::span<const batch> batches, duplicate_policy policy,
                        stream_view stream, bool is_listed);
    std::shared_ptr<pending_call> enqueue_as(const transfer_plan& plan, row_direction direction,
                                             std::span<const batch> batches, duplicate_policy policy,
                                             stream_view stream);
    void take_ids(row_call& call);
    void enqueue_call(row_call& call);
    void begin_errors(row_call& call);
    void prepare_order(row_call& call);
    void await_preparing(row_call& call);
    void order_on_device(row_call& call, stream_view preparing);
    void move_in_order(row_call& call);
    void move_by_kernel(const row_call& call, row_transfer transfer, stream_view stream);
    void copy_row_by_row(row_call& call);
    void gather_staged_unsorted(row_call& call);
    void gather_staged(row_call& call, std::uint64_t begin);
    void scatter_staged(row_call& call, std::uint64_t begin);
    row_piece order_for_cpu(row_call& call, std::uint64_t begin);
    void give_back(row_call& call);
    void finish(row_call& call);
    void abandon(row_call& call) noexcept;

    staging_ring& take_ring(row_call& call);
    std::uint64_t rows_of_piece(const staging_ring& ring) const;
    void gather_piece(const row_piece& rows, kept_duplicate which, std::byte* buffer);
    void scatter_piece(const row_piece& rows, kept_duplicate which, const std::byte* buffer);

    row_table table_;
    pinflow::device device_;
    row_exchange_options options_;
    std::uint64_t staging_bytes_;  ///< as in the options, or less if memory is short
    std::optional<pinned_pages> pages_;
    std::string not_reached_reason_;
    pinned_scratch pinned_;
    std::shared_ptr<call_errors> errors_;
    worker_threads workers_;
    tbb::task_arena arena_;
    stream own_stream_;  ///< of synchronous calls and measurements
    std::mutex preparing_mutex_;
    stream preparing_;  ///< copies and sorts indices from host memory; waits for no other stream
    stream_locks locks_;
    // last: its streams use the members above
    staging_rings rings_;
};

}  // namespace pinflow::detail
