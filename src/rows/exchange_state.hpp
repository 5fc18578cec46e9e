#pragma once

#include <tbb/task_arena.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "pinflow/pin.hpp"
#include "pinflow/rows.hpp"
#include "src/core/worker_threads.hpp"
#include "src/device/backend.hpp"
#include "src/rows/call_errors.hpp"
#include "src/rows/place_rows.hpp"
#include "src/rows/scratch.hpp"
#include "src/rows/staging.hpp"
#include "src/rows/transfer_plan.hpp"

namespace pinflow::detail {

enum class row_direction : std::uint8_t { gather, scatter };

/// What a row_exchange is: every route, enqueued. Members are called with `mutex` held, unless they say
/// otherwise.
class exchange_state {
 public:
    exchange_state(row_table table, pinflow::device device, const row_exchange_options& options);

    /// What one call takes, of all batches that travel together.
    static constexpr std::uint64_t max_rows_of_call = std::numeric_limits<std::uint32_t>::max();

    /// Indices that are worth a task of their own.
    static constexpr std::size_t ids_of_task = 16384;

    /// One batch, in either direction.
    struct batch {
        row_ids ids;
        std::byte* rows;
    };
    /// `waiter` is whom its errors are for: see call_errors.
    void enqueue(row_direction direction, std::span<const batch> batches, duplicate_policy policy,
                 stream_view stream, std::uint64_t waiter = 0);
    /// By this plan, whatever the options say; up to row_parts::max batches that are known to be right.
    void enqueue_as(const transfer_plan& plan, row_direction direction, std::span<const batch> batches,
                    duplicate_policy policy, stream_view stream, std::uint64_t waiter = 0);
    /// Enqueues one batch, waits for it, and throws what went wrong with it. Takes the lock itself.
    void run(row_direction direction, const batch& only, duplicate_policy policy);
    /// The plan for `batches` batches of `batch_rows` rows, with what it says of grouping.
    row_plan plan(row_direction direction, std::uint64_t batch_rows, unsigned batches);
    void check();

    const row_table& table() const noexcept { return table_; }
    const pinflow::device& device() const noexcept { return device_; }
    const row_exchange_options& options() const noexcept { return options_; }
    /// Whether the device reads the table where it lies; otherwise why not.
    bool reached() const noexcept { return not_reached_reason_.empty(); }
    const std::string& not_reached_reason() const noexcept { return not_reached_reason_; }
    /// Whether the table lies in a file. Whoever truncates that takes its pages from the CPU, locked or not.
    bool reads_file() const noexcept;
    std::uint64_t staging_buffer_bytes() const noexcept;
    /// For calls that are waited for.
    stream_view own_stream() const noexcept { return own_stream_; }
    int thread_count() const { return arena_.max_concurrency(); }

    std::mutex mutex;

 private:
    /// One call on its way.
    struct row_call {
        row_direction direction;
        std::span<const batch> batches;
        duplicate_policy policy;
        stream_view stream;
        transfer_plan plan;
        std::uint64_t waiter;

        row_parts parts{};
        std::uint64_t count = 0;
        bool ids_on_device = false;  ///< of some batch
        /// The indices of all batches in host memory, one behind the other; those on the device are left out.
        pinned_scratch::block* host_ids = nullptr;
        device_scratch scratch{};
        row_transfer transfer{};
        std::shared_ptr<call_errors::call> errors = nullptr;  ///< null: nothing can go wrong any more
        staging_ring* ring = nullptr;                         ///< on the staged route, and the hybrid one
        pinned_scratch::block* sorted_ids = nullptr;  ///< of the order, in host memory, for the CPU's part

        const std::uint64_t* ids_in_host_memory() const noexcept {
            return reinterpret_cast<const std::uint64_t*>(host_ids->data());
        }
        bool is_gather() const noexcept { return direction == row_direction::gather; }
        /// Whether the device, or the CPU, takes the rows in the order of their addresses.
        bool is_sorted() const noexcept { return plan.parts.front().sorted || !is_gather(); }
    };

    /// @throws unsupported for elements that cannot be added up.
    static sum_type sum_type_of(const dtype& type);

    void page_lock();
    void check_call(row_direction direction, std::span<const batch> batches, duplicate_policy policy,
                    stream_view stream) const;
    void check_apart(row_direction direction, std::span<const batch> batches) const;
    void check_sums(std::span<const batch> batches) const;
    void check_ids(row_direction direction, std::span<const batch> batches) const;
    void check_source() const;
    void take_ids(row_call& call);
    void begin_errors(row_call& call);
    void order_on_device(row_call& call);
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
    std::uint64_t staging_bytes_;  ///< of the options, or less when memory is short
    std::optional<pinned_pages> pages_;
    std::string not_reached_reason_;
    std::uint64_t last_waiter_ = 0;
    pinned_scratch pinned_;
    call_errors errors_;
    worker_threads workers_;
    tbb::task_arena arena_;
    stream own_stream_;
    stream preparing_;
    // what their streams work on is above
    std::optional<staging_rings> rings_;
};

}  // namespace pinflow::detail
