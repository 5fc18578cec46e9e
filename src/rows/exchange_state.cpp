#include "src/rows/exchange_state.hpp"

#include <fmt/format.h>
#include <tbb/blocked_range.h>
#include <tbb/info.h>
#include <tbb/parallel_reduce.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/memory_limits.hpp"

namespace pinflow::detail {

namespace {

/// Copies indices, and counts those of the copy that are outside the table. Isolated: otherwise this thread
/// could run another task of the caller's meanwhile.
std::uint64_t copy_ids(std::span<const std::uint64_t> ids, std::uint64_t* to, std::uint64_t row_count) {
    start_worker_threads();
    return tbb::this_task_arena::isolate([&] {
        return tbb::parallel_reduce(
            tbb::blocked_range<std::size_t>(0, ids.size(), exchange_state::ids_of_task), std::uint64_t{0},
            [&](const tbb::blocked_range<std::size_t>& part, std::uint64_t outside_count) {
                std::memcpy(to + part.begin(), ids.data() + part.begin(),
                            part.size() * sizeof(std::uint64_t));
                return outside_count + static_cast<std::uint64_t>(
                                           std::count_if(to + part.begin(), to + part.end(),
                                                         [=](std::uint64_t id) { return id >= row_count; }));
            },
            std::plus<>());
    });
}

/// The size of a staging buffer: large enough for the copy engine, small enough to overlap work.
constexpr std::uint64_t piece_bytes = std::uint64_t{8} << 20;
constexpr std::uint64_t min_buffers = 2;
constexpr std::uint64_t max_buffers = 16;

/// Limits `staging_bytes` to an eighth of the available memory. On the host device a ring takes twice that,
/// and there may be several rings.
std::uint64_t within_memory(std::uint64_t staging_bytes) {
    return std::min(staging_bytes, read_available_memory().size_bytes / 8);
}

}  // namespace

exchange_state::exchange_state(row_table table, pinflow::device device, const row_exchange_options& options)
    : table_(std::move(table)),
      device_(device),
      options_(options),
      staging_bytes_(within_memory(options.staging_bytes)),
      pinned_(device),
      errors_(std::make_shared<call_errors>(device)),
      workers_(options.threads),
      arena_(static_cast<int>(workers_.count())),
      own_stream_(device),
      preparing_(device),
      rings_(device, staging_buffer_bytes(),
             static_cast<unsigned>(
                 std::clamp(staging_bytes_ / staging_buffer_bytes(), min_buffers, max_buffers))) {
    const bool is_part = options_.staged_share >= 0 && options_.staged_share < 1;
    if (!is_part) {
        throw invalid_argument(fmt::format(
            "the staged share of the hybrid route must be 0 (the planner's) or more, and below 1, not {}",
            options_.staged_share));
    }
    device_.backend().prepare_rows();
    page_lock();
    const bool needs_reach = options_.route == row_route::direct || options_.route == row_route::copy ||
                             options_.route == row_route::hybrid;
    if (needs_reach && !reached()) {
        throw unsupported(
            fmt::format("the route {} cannot be taken: {}", to_string(options_.route), not_reached_reason_));
    }
}

bool exchange_state::is_file_backed() const noexcept {
    return table_.source() != nullptr && !table_.source()->extents().empty() &&
           table_.source()->extents()[0].file != nullptr;
}

void exchange_state::page_lock() {
    // pages of a file are always held here, even if someone else has registered them
    const bool may_go = is_file_backed() && device_.kind() != device_kind::host;
    if (!may_go && device_.backend().reaches(table_.data(), table_.size_bytes())) return;
    if (options_.route == row_route::staged) {
        not_reached_reason_ = "the staged route was asked for";
        return;
    }
    pages_.emplace(
        std::vector<pin_range>{{{table_.data(), table_.size_bytes()}, table_.description(), table_.owner()}},
        device_,
        pin_options{
            .budget_bytes = options_.pin_budget_bytes, .limit = options_.pin_limit, .allow_partial = false});
    if (!pages_->wait()) {
        not_reached_reason_ =
            fmt::format("{} is not page-locked: {}", table_.description(), pages_->report().reason);
        pages_.reset();  // registering a part of the table is useless
    }
}

std::uint64_t exchange_state::staging_buffer_bytes() const noexcept {
    const std::uint64_t row_bytes = std::max<std::uint64_t>(table_.row_size_bytes(), 1);
    const std::uint64_t wanted_bytes = std::min(piece_bytes, staging_bytes_ / min_buffers);
    return std::max(wanted_bytes / row_bytes, std::uint64_t{1}) * row_bytes;
}

/// Gives the call staging buffers. Their streams start after the work on the call's stream so far.
staging_ring& exchange_state::take_ring(row_call& call) {
    call.ring = rings_.take(call.stream);
    call.ring->begin_after(call.stream);
    return *call.ring;
}

std::uint64_t exchange_state::rows_of_piece(const staging_ring& ring) const {
    return ring.buffer_bytes() / table_.row_size_bytes();
}

void exchange_state::check_source() const {
    if (table_.source()) table_.source()->check_unchanged();
}

void exchange_state::check() {
    errors_->check();
    check_source();
}

// ---- a call ----------------------------------------------------------------------------------------------

void exchange_state::run(row_direction direction, const batch& only, duplicate_policy policy) {
    const pending_calls calls = enqueue(direction, {&only, 1}, policy, own_stream_, false);
    own_stream_.synchronize();
    for (const std::shared_ptr<pending_call>& call : calls)
        errors_->check(*call);
    check_source();
}

exchange_state::pending_calls exchange_state::enqueue(row_direction direction, std::span<const batch> batches,
                                                      duplicate_policy policy, stream_view stream,
                                                      bool is_listed) {
    check_source();
    check_call(direction, batches, policy, stream);
    std::vector<row_call> calls;
    calls.reserve((batches.size() + row_parts::max - 1) / row_parts::max);
    while (!batches.empty()) {
        const auto together = batches.first(std::min<std::size_t>(batches.size(), row_parts::max));
        batches = batches.subspan(together.size());
        calls.push_back(begin_call(direction, together, policy, stream, is_listed));
    }
    pending_calls pending;
    pending.reserve(calls.size());
    check_ids(calls);  // of all calls, before any row is touched
    const std::unique_lock lock = locks_.lock(stream);
    for (row_call& call : calls) {
        if (call.count == 0) continue;
        call.plan = plan_of(direction, call.count, !call.ids_on_device).plan;
        enqueue_call(call);
        if (call.errors) pending.push_back(call.errors);
    }
    return pending;
}

/// Enqueues batches with this plan, whatever the options say, without checks. Takes up to row_parts::max
/// batches.
std::shared_ptr<pending_call> exchange_state::enqueue_as(const transfer_plan& plan, row_direction direction,
                                                         std::span<const batch> batches,
                                                         duplicate_policy policy, stream_view stream) {
    row_call call = begin_call(direction, batches, policy, stream, false);
    call.plan = plan;
    const std::unique_lock lock = locks_.lock(stream);
    enqueue_call(call);
    return call.errors;
}

exchange_state::row_call exchange_state::begin_call(row_direction direction, std::span<const batch> batches,
                                                    duplicate_policy policy, stream_view stream,
                                                    bool is_listed) {
    row_call call{direction, batches, policy, stream, is_listed};
    for (const batch& each : batches) {
        call.parts.rows[call.parts.count] = each.rows;
        call.parts.first[call.parts.count++] = call.count;
        call.count += each.ids.size();
        call.ids_on_device = call.ids_on_device || (each.ids.on_device() && each.ids.size() > 0);
    }
    call.parts.first[call.parts.count] = call.count;
    take_ids(call);
    return call;
}

void exchange_state::enqueue_call(row_call& call) {
    if (table_.row_size_bytes() == 0) return;
    try {
        if (call.plan.main() == transfer::copy_engine) {
            copy_row_by_row(call);
        } else if (call.plan.main() == transfer::staged && !call.is_sorted() && !call.ids_on_device) {
            gather_staged_unsorted(call);
        } else {
            prepare_order(call);
            move_in_order(call);
        }
        finish(call);
        call.ring = {};  // for the next call
    } catch (...) {
        abandon(call);
        throw;
    }
}

/// Copies the indices in host memory, so that the caller may reuse or change them, and checks the copies.
void exchange_state::take_ids(row_call& call) {
    std::uint64_t host_id_count = 0;
    for (const batch& each : call.batches) {
        if (!each.ids.on_device()) host_id_count += each.ids.size();
    }
    if (host_id_count == 0) return;
    call.host_ids = taken_block(pinned_, host_id_count * sizeof(std::uint64_t));
    auto* to = reinterpret_cast<std::uint64_t*>(call.host_ids.data());
    for (const batch& each : call.batches) {
        if (each.ids.on_device() || each.ids.size() == 0) continue;
        call.outside_count += copy_ids({each.ids.data(), each.ids.size()}, to, table_.row_count());
        to += each.ids.size();
    }
}

void exchange_state::begin_errors(row_call& call) {
    if (!call.errors) call.errors = errors_->begin();
}

/// Prepares the order of the rows on the device. Indices in host memory need not wait for earlier work of the
/// call's stream.
void exchange_state::prepare_order(row_call& call) {
    const bool refuses_repeated = !call.is_gather() && call.policy == duplicate_policy::error;
    if (call.ids_on_device || refuses_repeated) begin_errors(call);
    if (call.ids_on_device) return order_on_device(call, call.stream);
    {
        const std::lock_guard lock(preparing_mutex_);
        order_on_device(call, preparing_);
    }
    await_preparing(call);
}

/// Makes the call's stream wait for what was prepared so far. The mark is that of the call's own indices.
void exchange_state::await_preparing(row_call& call) {
    if (!call.host_ids) return;
    {
        const std::lock_guard lock(preparing_mutex_);
        call.host_ids->mark(preparing_);
    }
    call.host_ids->hold_up(call.stream);  // without the lock, because the stream's queue may be full
}

/// Copies the indices to the device, checks those that were already there, and sorts them, in the order of
/// `preparing`.
void exchange_state::order_on_device(row_call& call, stream_view preparing) {
    device_backend& backend = device_.backend();
    void* const stream = preparing.native_handle();
    const bool sorted = call.is_sorted();
    const bool refuses_repeated = !call.is_gather() && call.policy == duplicate_policy::error;
    const bool on_device_already = call.batches.size() == 1 && call.ids_on_device;
    constexpr std::uint64_t id_bytes = sizeof(std::uint64_t);
    const std::size_t ids_part = call.scratch.add(on_device_already ? 0 : call.count * id_bytes);
    const std::size_t sorted_part = call.scratch.add(sorted ? call.count * id_bytes : 0);
    const std::size_t positions_part = call.scratch.add(sorted ? call.count * sizeof(std::uint32_t) : 0);
    const std::size_t errors_part = call.scratch.add(sizeof(index_errors));
    call.scratch.allocate(preparing);

    auto* ids = call.scratch.part_as<std::uint64_t>(ids_part);
    const std::uint64_t* unsorted = ids;
    if (on_device_already) {
        unsorted = call.batches[0].ids.data();
    } else {
        const std::byte* from_host = call.host_ids ? call.host_ids.data() : nullptr;
        for (const batch& each : call.batches) {
            const std::uint64_t size_bytes = each.ids.size() * id_bytes;
            if (each.ids.on_device()) {
                backend.copy_on_device(reinterpret_cast<std::byte*>(ids),
                                       reinterpret_cast<const std::byte*>(each.ids.data()), size_bytes,
                                       stream);
            } else if (size_bytes > 0) {
                copy_to_device_async(reinterpret_cast<std::byte*>(ids), {from_host, size_bytes}, preparing);
                from_host += size_bytes;
            }
            ids += each.ids.size();
        }
    }

    auto* const errors = call.scratch.part_as<index_errors>(errors_part);
    const bool can_be_wrong = call.ids_on_device || refuses_repeated;
    if (can_be_wrong) {
        backend.fill_zero(call.scratch.part(errors_part), sizeof(index_errors), stream);
        if (call.ids_on_device) backend.check_rows(unsorted, call.count, table_.row_count(), errors, stream);
    }
    row_order order{unsorted, nullptr, call.count, false};
    if (sorted) {
        auto* const sorted_ids = call.scratch.part_as<std::uint64_t>(sorted_part);
        auto* const positions = call.scratch.part_as<std::uint32_t>(positions_part);
        backend.sort_rows(unsorted, call.count, table_.row_count(), sorted_ids, positions, stream);
        order = {sorted_ids, positions, call.count, true};
        if (refuses_repeated) backend.refuse_repeated_rows(order, errors, stream);
    }
    if (can_be_wrong) {
        backend.record_wrong_ids(unsorted, errors, stream);
        copy_to_host_async({reinterpret_cast<std::byte*>(call.errors->errors()), sizeof(index_errors)},
                           call.scratch.part(errors_part), preparing);
    }
    call.transfer.table = {const_cast<std::byte*>(table_.data()), table_.row_count(),
                           table_.row_size_bytes()};
    call.transfer.order = order;
    call.transfer.parts = call.parts;
    call.transfer.errors = can_be_wrong ? errors : nullptr;
    call.transfer.end = call.count;
    if (const transfer_part* const kernel = call.plan.find(transfer::kernel))
        call.transfer.blocks = kernel->blocks;
}

/// Returns the call's memory once its stream has completed the work enqueued so far.
void exchange_state::give_back(row_call& call) {
    call.host_ids.give_back(call.stream);
    call.sorted_ids.give_back(call.stream);
    call.scratch.release(call.stream);
}

void exchange_state::finish(row_call& call) {
    give_back(call);
    if (!call.errors) return;
    errors_->expect(call.errors,
                    fmt::format("rows of {} were not {}", table_.description(),
                                call.is_gather() ? "gathered" : "scattered"),
                    call.count, table_.row_count(), call.stream, call.is_listed);
}

/// Returns the memory of a call that failed while it was being enqueued: the enqueued part still uses it.
void exchange_state::abandon(row_call& call) noexcept {
    try {
        if (call.ring) call.ring->end_before(call.stream);
        await_preparing(call);
        give_back(call);
        if (call.errors) errors_->forget(*call.errors, call.stream);
        call.errors = nullptr;
        // the caller of a synchronous call may free its memory when the call throws
        if (call.stream.native_handle() == own_stream_.view().native_handle()) own_stream_.synchronize();
    } catch (...) {
        // the caller gets the first error; memory still in use must not be freed, so wait
        const auto wait_for = [](stream_view stream) {
            try {
                stream.synchronize();
            } catch (...) {
                return;  // a failed device runs nothing any more
            }
        };
        wait_for(preparing_);
        if (call.ring) std::ranges::for_each(call.ring->streams(), wait_for);
        wait_for(call.stream);
        if (call.errors) errors_->forget(*call.errors);
    }
}

// ---- in an order that the device has --------------------------------------------------------------------

/// Moves the first rows by kernel and, at the same time, the others through staging buffers.
void exchange_state::move_in_order(row_call& call) {
    const transfer_part* const staged_part = call.plan.find(transfer::staged);
    const double share = staged_part == nullptr ? 0.0 : staged_part->share;
    const auto staged =
        std::min(call.count, static_cast<std::uint64_t>(share * static_cast<double>(call.count)));
    const std::uint64_t direct = call.count - staged;
    const bool has_staged = direct < call.count;
    if (has_staged) take_ring(call);  // does not wait for the work enqueued below
    if (direct > 0) {
        row_transfer transfer = call.transfer;
        transfer.end = direct;
        move_by_kernel(call, transfer, call.stream);
    }
    if (has_staged && call.is_gather()) gather_staged(call, direct);
    if (has_staged && !call.is_gather()) scatter_staged(call, direct);
    if (call.is_gather() && call.transfer.order.sorted)
        device_.backend().repeat_rows(call.transfer, call.stream.native_handle());
}

void exchange_state::move_by_kernel(const row_call& call, row_transfer transfer, stream_view stream) {
    device_backend& backend = device_.backend();
    const bool sum = !call.is_gather() && call.policy == duplicate_policy::sum;
    // the plan does not depend on the policy or the addresses of the batches, so correct it here
    const bool is_busy = sum || !is_aligned(transfer);
    if (is_busy && transfer.blocks != 0 && options_.blocks == 0)
        transfer.blocks = std::max(transfer.blocks, busy_blocks(facts_of(call.direction, call.count, true)));
    if (call.is_gather()) return backend.gather_rows(transfer, stream.native_handle());
    backend.scatter_rows(transfer, sum ? repeated_rows::sum : repeated_rows::last,
                         sum ? sum_type_of(table_.element()) : sum_type::float32, stream.native_handle());
}

}  // namespace pinflow::detail
