#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "pinflow/empty_on_move.hpp"
#include "src/rows/calls_in_flight.hpp"
#include "src/rows/device_scratch.hpp"
#include "src/rows/exchange_setup.hpp"
#include "src/rows/staging.hpp"

namespace pinflow::detail {

/// One batch, in either direction.
struct row_batch {
    row_ids ids;
    std::byte* rows;  ///< device memory for ids.size() rows, contiguous; a scatter only reads it
};

/// What the caller of a row exchange wants. Borrows the batches. A request of one call has at most
/// row_parts::max of them: see exchange_state::split.
struct call_request {
    row_direction direction;
    std::span<const row_batch> batches;
    duplicate_policy policy;
    stream_view stream;
    bool is_listed = true;  ///< calls_in_flight::check() throws its errors
};

/// A stream that copies and sorts indices from host memory. It waits for no other stream.
struct preparing_stream {
    explicit preparing_stream(const pinflow::device& device) : stream(device) {}
    std::mutex mutex;  ///< for what one call enqueues
    pinflow::stream stream;
};

/// One call of a row exchange while it is being enqueued: its memory, and the order of its rows. Owns
/// `memory`, and borrows the other arguments of its constructor. For one thread at a time. A call that has
/// begun and is destroyed before `finish` is abandoned: what it uses is released after the work that it has
/// enqueued.
class row_call {
 public:
    /// The maximum scratch memory of a call of up to `max_rows` rows.
    static std::uint64_t max_scratch_bytes(const exchange_setup& setup, std::uint64_t max_rows);

    /// Copies the indices in host memory to `memory`, on all cores, so that the caller may reuse or change
    /// them.
    row_call(const exchange_setup& setup, preparing_stream& preparing, calls_in_flight& calls,
             const call_request& request, taken_memory memory);
    row_call(row_call&&) noexcept = default;
    row_call& operator=(row_call&&) = delete;
    row_call(const row_call&) = delete;
    row_call& operator=(const row_call&) = delete;
    ~row_call() {
        if (has_begun_) abandon();
    }

    const call_request& request() const noexcept { return request_; }
    stream_view stream() const noexcept { return request_.stream; }
    bool is_gather() const noexcept { return request_.direction == row_direction::gather; }
    std::uint64_t count() const noexcept { return transfer_.end; }
    /// Whether the indices of some batch are in device memory.
    bool has_device_ids() const noexcept { return has_device_ids_; }
    /// The indices of all batches that have them in host memory, contiguous.
    const std::uint64_t* host_ids() const noexcept { return memory_->ids(); }
    /// How many of these are outside the table.
    std::uint64_t outside_count() const noexcept { return outside_count_; }

    /// Begins to enqueue the call by this plan.
    void begin(transfer_plan plan);
    const transfer_plan& plan() const noexcept { return plan_; }
    /// Whether rows are moved in the order of their indices.
    bool is_sorted() const noexcept {
        // direct scatters on the host device: sums, and the search for repeated indices, need sorted rows
        const bool keeps_last = request_.policy == duplicate_policy::last;
        return plan_.parts.front().sorted || (!is_gather() && !keeps_last);
    }
    /// Enqueues the preparation of the rows' order on the device: copies, checks and sorts the indices, as
    /// far as needed. On a GPU, if all indices are in host memory, it runs on the preparing stream and waits
    /// for no earlier work of the call's stream.
    void prepare_order();
    /// What kernels need to move all rows. Its order, `errors` and `report` are set by prepare_order.
    const row_transfer& transfer() const noexcept { return transfer_; }
    /// Page-locked memory for `count` indices: the memory of `host_ids`. Only work that is enqueued after
    /// prepare_order may write to it.
    std::uint64_t* ids_for_cpu() const noexcept { return memory_->ids(); }

    /// Receives errors that are found after the call has returned. Made on first use.
    const std::shared_ptr<pending_call>& errors();
    bool has_errors() const noexcept { return errors_ != nullptr; }
    /// The errors of indices that the device has found. For work in the order of the call's stream.
    const index_errors* reported_errors() const noexcept { return memory_->errors().report; }

    staging_rings::taken_ring ring;  ///< of the staged transfer

    /// Puts the call in flight: its memory is in use until its stream has completed the work enqueued so far.
    void finish();

 private:
    void copy_ids_to(std::uint64_t* ids, stream_view preparing) const;
    bool gather_checks() const noexcept;
    void order_on_device(stream_view preparing);
    void await_preparing();
    void abandon() noexcept;

    const exchange_setup& setup_;
    preparing_stream& preparing_;
    calls_in_flight& calls_;
    call_request request_;
    taken_memory memory_;
    bool has_device_ids_ = false;
    bool has_host_ids_ = false;
    std::uint64_t outside_count_ = 0;
    transfer_plan plan_{};
    device_scratch scratch_{};
    row_transfer transfer_{};
    std::shared_ptr<pending_call> errors_;  ///< null: no error is possible
    empty_on_move<bool> has_begun_ = false;
};

}  // namespace pinflow::detail
