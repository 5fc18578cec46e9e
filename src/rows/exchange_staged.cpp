#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <exception>
#include <span>

#include "src/core/fault_guard.hpp"
#include "src/rows/exchange_state.hpp"

/// The staged route: rows pass through pinned staging buffers, piece by piece. A call enqueues all of its
/// work before it returns, and host functions enqueue nothing. Otherwise a stream could wait for work that is
/// not enqueued yet. A CUDA call that waits for that stream and blocks other threads (freeing memory, loading
/// a kernel) would then be a deadlock.
namespace pinflow::detail {

namespace {

/// The number of bytes that one task moves.
constexpr std::uint64_t bytes_of_task = 256 << 10;

bool refused(const index_errors& errors) {
    return errors.outside_count != 0 || errors.repeated_count != 0;
}

/// The kernel's transfer for the rows of `piece`, which are contiguous in the buffer's device memory.
row_transfer through(const staging_ring::buffer& buffer, row_transfer whole, const row_piece& piece) {
    whole.table = {buffer.on_device.data(), piece.end - piece.begin, piece.row_size_bytes};
    whole.begin = piece.begin;
    whole.end = piece.end;
    whole.compact = true;
    whole.blocks = 0;
    return whole;
}

/// Calls `work` with parts of `rows`, in parallel.
template <typename Work>
void for_parts(const row_piece& rows, tbb::task_arena& arena, Work work) {
    const std::uint64_t grain = std::max<std::uint64_t>(bytes_of_task / rows.row_size_bytes, 1);
    arena.execute([&] {
        tbb::parallel_for(tbb::blocked_range<std::uint64_t>(rows.begin, rows.end, grain),
                          [&](const tbb::blocked_range<std::uint64_t>& range) {
                              row_piece part = rows;
                              part.begin = range.begin();
                              part.end = range.end();
                              work(part, (range.begin() - rows.begin) * rows.row_size_bytes);
                          });
    });
}

}  // namespace

/// Runs on a host function's thread.
void exchange_state::gather_piece(const row_piece& rows, kept_duplicate which, std::byte* buffer) {
    const bool from_file = is_file_backed();
    for_parts(rows, arena_, [&](const row_piece& part, std::uint64_t offset_bytes) {
        const std::uint64_t count = part.end - part.begin;
        const auto gather = [&, to = buffer + offset_bytes] {
            gather_on_cpu(table_.data(), part, which, to);
        };
        if (!from_file) return gather();
        if (is_guarded_thread() && run_guarded(gather)) return;
        static_cast<void>(table_.source()->read_rows(part.ids.subspan(part.begin, count),
                                                     {buffer + offset_bytes, count * part.row_size_bytes}));
    });
}

void exchange_state::scatter_piece(const row_piece& rows, kept_duplicate which, const std::byte* buffer) {
    for_parts(rows, arena_, [&](const row_piece& part, std::uint64_t offset_bytes) {
        scatter_on_cpu(const_cast<std::byte*>(table_.data()), part, which, buffer + offset_bytes);
    });
}

/// Copies rows in the order of the call, from the buffers straight to the destinations.
void exchange_state::gather_staged_unsorted(row_call& call) {
    staging_ring& ring = take_ring(call);
    begin_errors(call);
    const std::uint64_t row_bytes = table_.row_size_bytes();
    const row_piece all{{call.ids_in_host_memory(), call.count}, 0, call.count, row_bytes};
    unsigned part = 0;
    for (std::uint64_t begin = 0; begin < call.count; begin += rows_of_piece(ring)) {
        row_piece piece = all;
        piece.begin = begin;
        piece.end = std::min(begin + rows_of_piece(ring), call.count);
        staging_ring::buffer& buffer = ring.next();
        buffer.cpu.wait(buffer.free);
        buffer.cpu.host_function_async([this, piece, errors = call.errors, to = buffer.host.data()] {
            try {
                gather_piece(piece, kept_duplicate::all, to);
            } catch (...) {
                errors->add(std::current_exception());
            }
        });
        buffer.filled.record(buffer.cpu);
        ring.copies().wait(buffer.filled);
        for (std::uint64_t at = begin; at < piece.end;) {
            while (at >= call.parts.first[part + 1])
                ++part;
            const std::uint64_t end = std::min(piece.end, call.parts.first[part + 1]);
            copy_to_device_async(call.parts.rows[part] + (at - call.parts.first[part]) * row_bytes,
                                 {buffer.host.data() + (at - begin) * row_bytes, (end - at) * row_bytes},
                                 ring.copies());
            at = end;
        }
        buffer.free.record(ring.copies());
    }
    ring.end_before(call.stream);
}

/// Enqueues the copy of the order's indices, from `begin` on, to host memory. They can be read once the copy
/// stream has passed. The index before `begin` is copied too: equal indices are found by comparing
/// neighbours.
row_piece exchange_state::order_for_cpu(row_call& call, std::uint64_t begin) {
    const std::uint64_t known = begin == 0 ? 0 : begin - 1;
    call.sorted_ids = taken_block(pinned_, call.count * sizeof(std::uint64_t));
    auto* const ids = reinterpret_cast<std::uint64_t*>(call.sorted_ids.data());
    copy_to_host_async(std::as_writable_bytes(std::span(ids + known, call.count - known)),
                       reinterpret_cast<const std::byte*>(call.transfer.order.ids + known),
                       call.ring->copies());
    return {{ids, call.count}, begin, call.count, table_.row_size_bytes()};
}

/// Gathers the rows of the order from index `begin` on. The ring must have been taken before the kernel's
/// part is enqueued on the call's stream, so that staging does not wait for the kernel.
void exchange_state::gather_staged(row_call& call, std::uint64_t begin) {
    staging_ring& ring = *call.ring;
    const row_piece all = order_for_cpu(call, begin);
    begin_errors(call);
    ring.cpu_waits_for_copies();  // for the indices
    for (std::uint64_t at = begin; at < call.count; at += rows_of_piece(ring)) {
        row_piece piece = all;
        piece.begin = at;
        piece.end = std::min(at + rows_of_piece(ring), call.count);
        staging_ring::buffer& buffer = ring.next();
        buffer.cpu.wait(buffer.free);
        const kept_duplicate which = call.transfer.order.sorted ? kept_duplicate::first : kept_duplicate::all;
        buffer.cpu.host_function_async([this, piece, errors = call.errors, which, to = buffer.host.data()] {
            if (refused(*errors->errors())) return;
            try {
                gather_piece(piece, which, to);
            } catch (...) {
                errors->add(std::current_exception());
            }
        });
        buffer.filled.record(buffer.cpu);
        ring.copies().wait(buffer.filled);
        const std::uint64_t size_bytes = (piece.end - piece.begin) * piece.row_size_bytes;
        copy_to_device_async(buffer.on_device.data(), {buffer.host.data(), size_bytes}, ring.copies());
        move_by_kernel(call, through(buffer, call.transfer, piece), ring.copies());
        buffer.free.record(ring.copies());
    }
    ring.end_before(call.stream);
}

/// Scatters the rows of the order from index `begin` on.
void exchange_state::scatter_staged(row_call& call, std::uint64_t begin) {
    staging_ring& ring = *call.ring;
    const row_piece all = order_for_cpu(call, begin);
    begin_errors(call);
    for (std::uint64_t at = begin; at < call.count; at += rows_of_piece(ring)) {
        row_piece piece = all;
        piece.begin = at;
        piece.end = std::min(at + rows_of_piece(ring), call.count);
        staging_ring::buffer& buffer = ring.next();
        ring.copies().wait(buffer.free);
        move_by_kernel(call, through(buffer, call.transfer, piece), ring.copies());
        const std::uint64_t size_bytes = (piece.end - piece.begin) * piece.row_size_bytes;
        copy_to_host_async(buffer.host.bytes().first(size_bytes), buffer.on_device.data(), ring.copies());
        buffer.filled.record(ring.copies());
        buffer.cpu.wait(buffer.filled);
        const kept_duplicate which =
            call.policy == duplicate_policy::sum ? kept_duplicate::first : kept_duplicate::last;
        buffer.cpu.host_function_async([this, piece, errors = call.errors, which, from = buffer.host.data()] {
            if (refused(*errors->errors())) return;
            try {
                scatter_piece(piece, which, from);
            } catch (...) {
                errors->add(std::current_exception());
            }
        });
        buffer.free.record(buffer.cpu);
    }
    ring.end_before(call.stream);
}

}  // namespace pinflow::detail
