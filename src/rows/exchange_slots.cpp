#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <exception>
#include <span>

#include "src/core/fault_guard.hpp"
#include "src/rows/exchange_state.hpp"

/// The staged route: rows pass through page-locked slots, piece by piece. All of a call's work is enqueued
/// when the call returns, and host functions enqueue nothing: a stream that waited for what is still to be
/// enqueued would never go on while some CUDA call waits for that stream and keeps others out (freeing
/// memory, loading a kernel).
namespace pinflow::detail {

namespace {

/// Bytes that are worth a task of their own.
constexpr std::uint64_t bytes_of_task = 256 << 10;

bool refused(const row_faults& faults) {
    return faults.outside_count != 0 || faults.repeated_count != 0;
}

/// What a kernel does with the rows of `piece`, which lie one after the other in a slot's device memory.
row_transfer through(const staging::slot& slot, row_transfer whole, const placed_rows& piece) {
    whole.table = {slot.on_device.data(), piece.end - piece.begin, piece.row_size_bytes};
    whole.begin = piece.begin;
    whole.end = piece.end;
    whole.compact = true;
    whole.blocks = 0;
    return whole;
}

/// Calls `work` with parts of `rows`, side by side.
template <typename Work>
void for_parts(const placed_rows& rows, tbb::task_arena& arena, Work work) {
    const std::uint64_t grain = std::max<std::uint64_t>(bytes_of_task / rows.row_size_bytes, 1);
    arena.execute([&] {
        tbb::parallel_for(tbb::blocked_range<std::uint64_t>(rows.begin, rows.end, grain),
                          [&](const tbb::blocked_range<std::uint64_t>& range) {
                              placed_rows part = rows;
                              part.begin = range.begin();
                              part.end = range.end();
                              work(part, (range.begin() - rows.begin) * rows.row_size_bytes);
                          });
    });
}

}  // namespace

/// On a host function's thread, without the lock.
void exchange_state::gather_piece(const placed_rows& rows, of_equal which, std::byte* slot) {
    const bool from_file = reads_file();
    for_parts(rows, arena_, [&](const placed_rows& part, std::uint64_t offset_bytes) {
        const std::uint64_t count = part.end - part.begin;
        const auto gather = [&, to = slot + offset_bytes] { gather_on_cpu(table_.data(), part, which, to); };
        if (!from_file) return gather();
        if (is_guarded_thread() && run_guarded(gather)) return;
        static_cast<void>(table_.source()->read_rows(part.ids.subspan(part.begin, count),
                                                     {slot + offset_bytes, count * part.row_size_bytes}));
    });
}

void exchange_state::scatter_piece(const placed_rows& rows, of_equal which, const std::byte* slot) {
    for_parts(rows, arena_, [&](const placed_rows& part, std::uint64_t offset_bytes) {
        scatter_on_cpu(const_cast<std::byte*>(table_.data()), part, which, slot + offset_bytes);
    });
}

/// In the order of the call, straight to the destinations.
void exchange_state::gather_unsorted_through_slots(row_call& call) {
    staging& lane = take_lane(call);
    begin_faults(call);
    const std::uint64_t row_bytes = table_.row_size_bytes();
    const placed_rows all{{call.ids_in_host_memory(), call.count}, 0, call.count, row_bytes};
    unsigned part = 0;
    for (std::uint64_t begin = 0; begin < call.count; begin += rows_of_piece(lane)) {
        placed_rows piece = all;
        piece.begin = begin;
        piece.end = std::min(begin + rows_of_piece(lane), call.count);
        staging::slot& slot = lane.next();
        slot.cpu.wait(slot.free);
        slot.cpu.host_function_async([this, piece, faults = call.faults, to = slot.host.data()] {
            try {
                gather_piece(piece, of_equal::all, to);
            } catch (...) {
                faults->add(std::current_exception());
            }
        });
        slot.filled.record(slot.cpu);
        lane.copies().wait(slot.filled);
        for (std::uint64_t at = begin; at < piece.end;) {
            while (at >= call.parts.first[part + 1])
                ++part;
            const std::uint64_t end = std::min(piece.end, call.parts.first[part + 1]);
            copy_to_device_async(call.parts.rows[part] + (at - call.parts.first[part]) * row_bytes,
                                 {slot.host.data() + (at - begin) * row_bytes, (end - at) * row_bytes},
                                 lane.copies());
            at = end;
        }
        slot.free.record(lane.copies());
    }
    lane.end_before(call.stream);
}

/// The order's indices, in host memory once the lane's copies have come so far: from `begin` on, and the one
/// before, as of equal ones only one counts.
placed_rows exchange_state::order_for_cpu(row_call& call, std::uint64_t begin) {
    const std::uint64_t known = begin == 0 ? 0 : begin - 1;
    call.sorted_ids = &pinned_.take(call.count * sizeof(std::uint64_t));
    auto* const ids = reinterpret_cast<std::uint64_t*>(call.sorted_ids->data());
    copy_to_host_async(std::as_writable_bytes(std::span(ids + known, call.count - known)),
                       reinterpret_cast<const std::byte*>(call.transfer.order.ids + known),
                       call.lane->copies());
    return {{ids, call.count}, begin, call.count, table_.row_size_bytes()};
}

/// The indices of the order from `begin` on; the lane was taken before what the device does by itself was
/// enqueued on the call's stream.
void exchange_state::gather_through_slots(row_call& call, std::uint64_t begin) {
    staging& lane = *call.lane;
    const placed_rows all = order_for_cpu(call, begin);
    begin_faults(call);
    event ids_there(device_);
    ids_there.record(lane.copies());
    lane.cpu_waits_for(ids_there);
    for (std::uint64_t at = begin; at < call.count; at += rows_of_piece(lane)) {
        placed_rows piece = all;
        piece.begin = at;
        piece.end = std::min(at + rows_of_piece(lane), call.count);
        staging::slot& slot = lane.next();
        slot.cpu.wait(slot.free);
        const of_equal which = call.transfer.order.sorted ? of_equal::first : of_equal::all;
        slot.cpu.host_function_async([this, piece, faults = call.faults, which, to = slot.host.data()] {
            if (refused(*faults->faults())) return;
            try {
                gather_piece(piece, which, to);
            } catch (...) {
                faults->add(std::current_exception());
            }
        });
        slot.filled.record(slot.cpu);
        lane.copies().wait(slot.filled);
        const std::uint64_t size_bytes = (piece.end - piece.begin) * piece.row_size_bytes;
        copy_to_device_async(slot.on_device.data(), {slot.host.data(), size_bytes}, lane.copies());
        move_by_kernel(call, through(slot, call.transfer, piece), lane.copies());
        slot.free.record(lane.copies());
    }
    lane.end_before(call.stream);
}

/// As gather_through_slots, the other way.
void exchange_state::scatter_through_slots(row_call& call, std::uint64_t begin) {
    staging& lane = *call.lane;
    const placed_rows all = order_for_cpu(call, begin);
    begin_faults(call);
    for (std::uint64_t at = begin; at < call.count; at += rows_of_piece(lane)) {
        placed_rows piece = all;
        piece.begin = at;
        piece.end = std::min(at + rows_of_piece(lane), call.count);
        staging::slot& slot = lane.next();
        lane.copies().wait(slot.free);
        move_by_kernel(call, through(slot, call.transfer, piece), lane.copies());
        const std::uint64_t size_bytes = (piece.end - piece.begin) * piece.row_size_bytes;
        copy_to_host_async(slot.host.bytes().first(size_bytes), slot.on_device.data(), lane.copies());
        slot.filled.record(lane.copies());
        slot.cpu.wait(slot.filled);
        const of_equal which = call.policy == duplicate_policy::sum ? of_equal::first : of_equal::last;
        slot.cpu.host_function_async([this, piece, faults = call.faults, which, from = slot.host.data()] {
            if (refused(*faults->faults())) return;
            try {
                scatter_piece(piece, which, from);
            } catch (...) {
                faults->add(std::current_exception());
            }
        });
        slot.free.record(slot.cpu);
    }
    lane.end_before(call.stream);
}

}  // namespace pinflow::detail
