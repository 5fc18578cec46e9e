#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <exception>
#include <span>

#include "src/core/fault_guard.hpp"
#include "src/rows/call_transfer.hpp"
#include "src/rows/cpu_rows.hpp"

/// Rows pass through pinned staging buffers, piece by piece. A call enqueues all of its work before it
/// returns, and host functions enqueue nothing. Otherwise a stream could wait for work that is
/// not enqueued yet. A CUDA call that waits for that stream and blocks other threads (freeing memory, loading
/// a kernel) would then be a deadlock.
namespace pinflow::detail {

namespace {

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
    const std::uint64_t grain = std::max<std::uint64_t>(bytes_of_cpu_task / rows.row_size_bytes, 1);
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

class staged_transfer final : public call_transfer {
 public:
    staged_transfer(const exchange_setup& setup, staging_rings& rings, tbb::task_arena& arena)
        : setup_(setup), rings_(rings), arena_(arena) {}

    /// Unsorted rows with indices in host memory need none: they are copied from the buffers directly to the
    /// batches.
    bool needs_order(const row_call& call) const override {
        return call.is_sorted() || call.has_device_ids();
    }

    void begin(row_call& call) override {
        call.ring = rings_.take(call.stream());
        call.ring->begin_after(call.stream());
    }

    void move(row_call& call, std::uint64_t begin, std::uint64_t end) override {
        if (!needs_order(call)) {
            gather_unsorted(call, begin, end);
        } else if (call.is_gather()) {
            gather(call, begin, end);
        } else {
            scatter(call, begin, end);
        }
        call.ring->end_before(call.stream());
    }

 private:
    // on a host function's thread
    void gather_piece(const row_piece& rows, kept_duplicate which, std::byte* buffer);
    void scatter_piece(const row_piece& rows, kept_duplicate which, const std::byte* buffer);

    void gather_unsorted(row_call& call, std::uint64_t begin, std::uint64_t end);
    void gather(row_call& call, std::uint64_t begin, std::uint64_t end);
    void scatter(row_call& call, std::uint64_t begin, std::uint64_t end);
    row_piece order_for_cpu(const row_call& call, std::uint64_t begin, std::uint64_t end) const;
    /// Calls `enqueue` with a buffer and the rows that pass through it, piece by piece.
    template <typename Enqueue>
    void for_pieces(row_call& call, const row_piece& rows, Enqueue enqueue) {
        const std::uint64_t rows_of_buffer = call.ring->buffer_bytes() / rows.row_size_bytes;
        for (std::uint64_t at = rows.begin; at < rows.end; at += rows_of_buffer) {
            row_piece piece = rows;
            piece.begin = at;
            piece.end = std::min(at + rows_of_buffer, rows.end);
            enqueue(call.ring->next(), piece);
        }
    }

    /// Enqueues `work` of the CPU on a buffer. Its exception becomes the call's error. Does nothing if the
    /// device has found wrong indices.
    template <typename Work>
    static void enqueue_on_cpu(row_call& call, const staging_ring::buffer& buffer, Work work) {
        buffer.cpu.host_function_async([errors = call.errors(), wrong = call.reported_errors(), work] {
            if (refused(*wrong)) return;
            try {
                work();
            } catch (...) {
                errors->add(std::current_exception());
            }
        });
    }

    const exchange_setup& setup_;
    staging_rings& rings_;
    tbb::task_arena& arena_;
};

void staged_transfer::gather_piece(const row_piece& rows, kept_duplicate which, std::byte* buffer) {
    const row_table& table = setup_.table;
    const bool from_file = setup_.is_file_backed();
    for_parts(rows, arena_, [&](const row_piece& part, std::uint64_t offset_bytes) {
        const std::uint64_t count = part.end - part.begin;
        const auto gather = [&, to = buffer + offset_bytes] { gather_on_cpu(table.data(), part, which, to); };
        if (!from_file) return gather();
        if (is_guarded_thread() && run_guarded(gather)) return;
        static_cast<void>(table.source()->read_rows(part.ids.subspan(part.begin, count),
                                                    {buffer + offset_bytes, count * part.row_size_bytes}));
    });
}

void staged_transfer::scatter_piece(const row_piece& rows, kept_duplicate which, const std::byte* buffer) {
    for_parts(rows, arena_, [&](const row_piece& part, std::uint64_t offset_bytes) {
        scatter_on_cpu(const_cast<std::byte*>(setup_.table.data()), part, which, buffer + offset_bytes);
    });
}

void staged_transfer::gather_unsorted(row_call& call, std::uint64_t begin, std::uint64_t end) {
    const staging_ring& ring = *call.ring;
    const row_parts& parts = call.transfer().parts;
    const std::uint64_t row_bytes = setup_.table.row_size_bytes();
    unsigned part = 0;
    for_pieces(call, {{call.host_ids(), call.count()}, begin, end, row_bytes},
               [&](staging_ring::buffer& buffer, const row_piece& piece) {
                   buffer.cpu.wait(buffer.free);
                   enqueue_on_cpu(call, buffer, [this, piece, to = buffer.host.data()] {
                       gather_piece(piece, kept_duplicate::all, to);
                   });
                   buffer.filled.record(buffer.cpu);
                   ring.copies().wait(buffer.filled);
                   for (std::uint64_t at = piece.begin; at < piece.end;) {
                       while (at >= parts.first[part + 1])
                           ++part;
                       const std::uint64_t last = std::min(piece.end, parts.first[part + 1]);
                       copy_to_device_async(
                           parts.rows[part] + (at - parts.first[part]) * row_bytes,
                           {buffer.host.data() + (at - piece.begin) * row_bytes, (last - at) * row_bytes},
                           ring.copies());
                       at = last;
                   }
                   buffer.free.record(ring.copies());
               });
}

/// Enqueues the copy of the order's indices to host memory. They can be read once the copy stream has
/// completed the copy. The index before `begin` is copied too: equal indices are found by comparing
/// neighbours.
row_piece staged_transfer::order_for_cpu(const row_call& call, std::uint64_t begin, std::uint64_t end) const {
    const std::uint64_t known = begin == 0 ? 0 : begin - 1;
    std::uint64_t* const ids = call.ids_for_cpu();
    copy_to_host_async(std::as_writable_bytes(std::span(ids + known, call.count() - known)),
                       reinterpret_cast<const std::byte*>(call.transfer().order.ids + known),
                       call.ring->copies());
    return {{ids, call.count()}, begin, end, setup_.table.row_size_bytes()};
}

void staged_transfer::gather(row_call& call, std::uint64_t begin, std::uint64_t end) {
    staging_ring& ring = *call.ring;
    const row_piece all = order_for_cpu(call, begin, end);
    ring.cpu_waits_for_copies();  // for the indices
    const kept_duplicate which = call.transfer().order.sorted ? kept_duplicate::first : kept_duplicate::all;
    for_pieces(call, all, [&](staging_ring::buffer& buffer, const row_piece& piece) {
        buffer.cpu.wait(buffer.free);
        enqueue_on_cpu(call, buffer,
                       [this, piece, which, to = buffer.host.data()] { gather_piece(piece, which, to); });
        buffer.filled.record(buffer.cpu);
        ring.copies().wait(buffer.filled);
        const std::uint64_t size_bytes = (piece.end - piece.begin) * piece.row_size_bytes;
        copy_to_device_async(buffer.on_device.data(), {buffer.host.data(), size_bytes}, ring.copies());
        move_by_kernel(setup_, call, through(buffer, call.transfer(), piece), ring.copies());
        buffer.free.record(ring.copies());
    });
}

void staged_transfer::scatter(row_call& call, std::uint64_t begin, std::uint64_t end) {
    const staging_ring& ring = *call.ring;
    const row_piece all = order_for_cpu(call, begin, end);
    const kept_duplicate which =
        call.request().policy == duplicate_policy::sum ? kept_duplicate::first : kept_duplicate::last;
    for_pieces(call, all, [&](staging_ring::buffer& buffer, const row_piece& piece) {
        ring.copies().wait(buffer.free);
        move_by_kernel(setup_, call, through(buffer, call.transfer(), piece), ring.copies());
        const std::uint64_t size_bytes = (piece.end - piece.begin) * piece.row_size_bytes;
        copy_to_host_async(buffer.host.bytes().first(size_bytes), buffer.on_device.data(), ring.copies());
        buffer.filled.record(ring.copies());
        buffer.cpu.wait(buffer.filled);
        enqueue_on_cpu(call, buffer, [this, piece, which, from = buffer.host.data()] {
            scatter_piece(piece, which, from);
        });
        buffer.free.record(buffer.cpu);
    });
}

}  // namespace

std::unique_ptr<call_transfer> make_staged_transfer(const exchange_setup& setup, staging_rings& rings,
                                                    tbb::task_arena& arena) {
    return std::make_unique<staged_transfer>(setup, rings, arena);
}

}  // namespace pinflow::detail
