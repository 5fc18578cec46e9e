#pragma once

#include <tbb/task_arena.h>

#include <cstdint>
#include <memory>

#include "src/rows/row_call.hpp"

namespace pinflow::detail {

/// Carries out one part of a call's plan. The loader's counterpart is array_transfer. Members enqueue on the
/// call's stream, or on streams that are ordered with it in both directions. They block while the queue of
/// such a stream is full. `begin` also waits until a staging ring is free. Thread-safe.
class call_transfer {
 public:
    call_transfer() = default;
    call_transfer(const call_transfer&) = delete;
    call_transfer& operator=(const call_transfer&) = delete;
    virtual ~call_transfer() = default;

    /// Whether it needs the order that row_call::prepare_order makes.
    virtual bool needs_order(const row_call& /*call*/) const { return true; }
    /// Takes the staging ring that the call needs, and waits until one is free. Called for all parts before
    /// any of them enqueues its rows, so that parts do not wait for each other.
    virtual void begin(row_call& /*call*/) {}
    /// Enqueues the copies of the rows at `begin` ... `end` - 1 of the order, at least one.
    virtual void move(row_call& call, std::uint64_t begin, std::uint64_t end) = 0;
};

/// kernel_transfer.cpp: kernels read and write the table in place.
std::unique_ptr<call_transfer> make_kernel_transfer(const exchange_setup& setup);
/// file_transfer.cpp: on the host device, the CPU copies rows of a file. Indices in device
/// memory must have been checked by earlier work.
std::unique_ptr<call_transfer> make_file_transfer(const exchange_setup& setup, tbb::task_arena& arena);
/// engine_transfer.cpp: the copy engine makes one copy for each row, or for neighbours.
std::unique_ptr<call_transfer> make_engine_transfer(const exchange_setup& setup);
/// staged_transfer.cpp: the CPU gathers and scatters rows in staging buffers.
std::unique_ptr<call_transfer> make_staged_transfer(const exchange_setup& setup, staging_rings& rings,
                                                    tbb::task_arena& arena);

/// Enqueues a kernel that moves the rows of `transfer`. Uses more thread blocks for sums and unaligned rows,
/// unless the options set their number.
void move_by_kernel(const exchange_setup& setup, const row_call& call, row_transfer transfer,
                    stream_view stream);

}  // namespace pinflow::detail
