#include "src/rows/row_call.hpp"

#include <fmt/format.h>
#include <tbb/blocked_range.h>
#include <tbb/parallel_reduce.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "src/core/checked.hpp"
#include "src/core/worker_threads.hpp"
#include "src/device/backend.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t id_bytes = sizeof(std::uint64_t);

/// Copies indices, and returns how many of the copied ones are outside the table. Isolated from the caller's
/// tasks: otherwise this thread could run one of them while it waits, and if the caller's task group were
/// cancelled, nothing would be copied.
std::uint64_t copy_ids(std::span<const std::uint64_t> ids, std::uint64_t* to, std::uint64_t row_count) {
    constexpr std::size_t ids_of_task = 16384;
    start_worker_threads();
    tbb::task_group_context context(tbb::task_group_context::isolated);
    return tbb::this_task_arena::isolate([&] {
        return tbb::parallel_reduce(
            tbb::blocked_range<std::size_t>(0, ids.size(), ids_of_task), std::uint64_t{0},
            [&](const tbb::blocked_range<std::size_t>& part, std::uint64_t outside_count) {
                std::memcpy(to + part.begin(), ids.data() + part.begin(), part.size() * id_bytes);
                return outside_count + static_cast<std::uint64_t>(
                                           std::count_if(to + part.begin(), to + part.end(),
                                                         [=](std::uint64_t id) { return id >= row_count; }));
            },
            std::plus<>(), context);
    });
}

/// The parts of a call's scratch memory.
struct order_parts {
    struct needs {
        std::uint64_t count = 0;  ///< indices
        bool is_copied = false;   ///< otherwise the indices are used where they are
        bool is_sorted = false;
    };
    order_parts(device_scratch& scratch, const exchange_setup& setup, const needs& order)
        : sort_bytes(order.is_sorted ? setup.device.backend().sort_scratch_bytes(
                                           order.count, setup.table.row_count(), sort_kernels::one)
                                     : 0),
          ids(scratch.add(order.is_copied ? order.count * id_bytes : 0)),
          sorted_ids(scratch.add(order.is_sorted ? order.count * id_bytes : 0)),
          positions(scratch.add(order.is_sorted ? order.count * sizeof(std::uint32_t) : 0)),
          sort(scratch.add(sort_bytes)) {}

    std::uint64_t sort_bytes;
    std::size_t ids;
    std::size_t sorted_ids;
    std::size_t positions;
    std::size_t sort;
};

}  // namespace

std::uint64_t row_call::max_scratch_bytes(const exchange_setup& setup, std::uint64_t max_rows) {
    device_scratch scratch;
    const order_parts parts(scratch, setup, {.count = max_rows, .is_copied = true, .is_sorted = true});
    return scratch.size_bytes();
}

row_call::row_call(const exchange_setup& setup, preparing_stream& preparing, calls_in_flight& calls,
                   const call_request& request, taken_memory memory)
    : setup_(setup), preparing_(preparing), calls_(calls), request_(request), memory_(std::move(memory)) {
    row_parts& parts = transfer_.parts;
    std::uint64_t* to = memory_->ids();
    for (const row_batch& each : request_.batches) {
        parts.rows[parts.count] = each.rows;
        parts.first[parts.count++] = transfer_.end;
        transfer_.end += each.ids.size();
        if (each.ids.size() == 0) continue;
        (each.ids.on_device() ? has_device_ids_ : has_host_ids_) = true;
        if (each.ids.on_device()) continue;
        outside_count_ += copy_ids({each.ids.data(), each.ids.size()}, to, setup_.table.row_count());
        to += each.ids.size();
    }
    parts.first[parts.count] = transfer_.end;
    transfer_.table = {const_cast<std::byte*>(setup_.table.data()), setup_.table.row_count(),
                       setup_.table.row_size_bytes()};
}

void row_call::begin(transfer_plan plan) {
    has_begun_ = true;
    plan_ = std::move(plan);
    if (const transfer_part* const kernel = plan_.find(transfer::kernel)) transfer_.blocks = kernel->blocks;
}

const std::shared_ptr<pending_call>& row_call::errors() {
    if (!errors_) {
        errors_ = std::make_shared<pending_call>(
            pending_call::facts{.what = fmt::format("rows of {} were not {}", setup_.table.description(),
                                                    is_gather() ? "gathered" : "scattered"),
                                .count = count(),
                                .row_count = setup_.table.row_count(),
                                .is_listed = request_.is_listed});
    }
    return errors_;
}

// ---- the order of the rows -------------------------------------------------------------------------------

void row_call::prepare_order() {
    // a host stream would lose time waiting for another one, and has nothing to copy meanwhile
    if (has_device_ids_ || setup_.device.kind() == device_kind::host) return order_on_device(stream());
    {
        const std::lock_guard lock(preparing_.mutex);
        order_on_device(preparing_.stream);
    }
    await_preparing();
}

/// Makes the call's stream wait for what was prepared so far.
void row_call::await_preparing() {
    if (!has_host_ids_) return;
    {
        const std::lock_guard lock(preparing_.mutex);
        memory_->mark(preparing_.stream);
    }
    memory_->hold_up(stream());  // without the lock, because the stream's queue may be full
}

/// Copies the indices of all batches to device memory, in the order of `preparing`.
void row_call::copy_ids_to(std::uint64_t* ids, stream_view preparing) const {
    const auto* from_host = reinterpret_cast<const std::byte*>(host_ids());
    for (const row_batch& each : request_.batches) {
        const std::uint64_t size_bytes = each.ids.size() * id_bytes;
        auto* const to = reinterpret_cast<std::byte*>(ids);
        if (each.ids.on_device()) {
            const auto* const from = reinterpret_cast<const std::byte*>(each.ids.data());
            setup_.device.backend().copy_on_device(to, from, size_bytes, preparing.native_handle());
        } else if (size_bytes > 0) {
            copy_to_device_async(to, {from_host, size_bytes}, preparing);
            from_host += size_bytes;
        }
        ids += each.ids.size();
    }
}

/// Whether the call's gather checks the indices itself, which saves a launch of some 3 us. Each of its blocks
/// checks all of them.
bool row_call::gather_checks() const noexcept {
    // at this limit, 8 blocks check 131072 indices, and the call takes as long as with a check before it
    constexpr std::uint64_t max_checks = std::uint64_t{1} << 20;
    const bool is_one_kernel = plan_.parts.size() == 1 && plan_.main() == transfer::kernel;
    return is_gather() && !is_sorted() && is_one_kernel && !setup_.is_file_on_host() &&
           transfer_.blocks != 0 && saturated(count(), transfer_.blocks) <= max_checks;
}

/// Copies the indices to the device, has them checked if some may be wrong, and sorts them if the plan or a
/// scatter needs it, in the order of `preparing`.
void row_call::order_on_device(stream_view preparing) {
    device_backend& backend = setup_.device.backend();
    void* const stream = preparing.native_handle();
    const bool sorted = is_sorted();
    const bool refuses_repeated = !is_gather() && request_.policy == duplicate_policy::error;
    const bool can_be_wrong = has_device_ids_ || refuses_repeated;
    const bool is_there = request_.batches.size() == 1 && has_device_ids_;
    const order_parts parts(scratch_, setup_,
                            {.count = count(), .is_copied = !is_there, .is_sorted = sorted});
    if (can_be_wrong) errors();
    scratch_.allocate(memory_->scratch(), preparing, setup_.options.device_memory);

    const std::uint64_t* unsorted = scratch_.part_as<std::uint64_t>(parts.ids);
    if (is_there) {
        unsorted = request_.batches[0].ids.data();
    } else {
        copy_ids_to(scratch_.part_as<std::uint64_t>(parts.ids), preparing);
    }
    const error_memory& memory = memory_->errors();
    if (sorted) {
        auto* const sorted_ids = scratch_.part_as<std::uint64_t>(parts.sorted_ids);
        auto* const positions = scratch_.part_as<std::uint32_t>(parts.positions);
        backend.sort_rows(
            {unsorted, count(), setup_.table.row_count(), sorted_ids, positions, scratch_.part(parts.sort),
             parts.sort_bytes, sort_kernels::one, can_be_wrong ? memory : error_memory{}},
            stream);
        transfer_.order = {.ids = sorted_ids, .positions = positions, .count = count(), .sorted = true};
        if (refuses_repeated) backend.refuse_repeated_rows(transfer_.order, unsorted, memory, stream);
    } else {
        transfer_.order = {.ids = unsorted, .count = count()};
        if (can_be_wrong && !gather_checks())
            backend.check_rows(unsorted, count(), setup_.table.row_count(), memory, stream);
    }
    if (!can_be_wrong) return;
    if (gather_checks()) {
        transfer_.report = memory.report;
    } else {
        transfer_.errors = memory.found;
    }
}

// ---- the end ---------------------------------------------------------------------------------------------

void row_call::finish() {
    scratch_.release(stream());
    calls_.put_in_flight(memory_, stream(), errors_);
    ring = {};
    has_begun_ = false;
}

void row_call::abandon() noexcept {
    try {
        if (ring) ring->end_before(stream());
        await_preparing();
        scratch_.release(stream());
        if (memory_) calls_.put_in_flight(memory_, stream());
    } catch (...) {
        // memory still in use must not be freed, so wait
        const auto wait_for = [](stream_view stream) {
            try {
                stream.synchronize();
            } catch (...) {
                return;  // a failed device runs nothing any more
            }
        };
        wait_for(preparing_.stream);
        if (ring) std::ranges::for_each(ring->streams(), wait_for);
        wait_for(stream());
    }
}

}  // namespace pinflow::detail
