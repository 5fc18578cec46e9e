#pragma once

#include <string_view>

#include "src/rows/transfer_planner.hpp"

namespace pinflow::detail {

/// A route for a call, and why it is taken. Borrows `reason`.
struct call_route {
    row_route route = row_route::direct;
    std::string_view reason = {};  // NOLINT(readability-redundant-member-init): g++ wants it
    /// Whether the rows of a gather are sorted, if its route is direct or staged. Hybrid calls are always
    /// sorted, and so are scatters, except direct ones on the host device. Copies are never sorted.
    bool is_sorted = false;
    double staged_share = thresholds.default_staged_share;  ///< hybrid, unless the options set it
};

/// The plan that carries out a route, with the thread blocks and the staged share of the options if they are
/// set.
transfer_plan plan_of(const call_route& chosen, const call_facts& call);
/// The default number of thread blocks: few, so that rows in flight are neighbours and most SMs stay free for
/// other kernels.
unsigned default_blocks(const call_facts& call) noexcept;
/// Thread blocks for kernels that wait longer for each byte: unaligned rows, sums, scatters of short
/// rows to large tables.
unsigned busy_blocks(const call_facts& call) noexcept;
/// Whether staging buffers of this size are large enough to be used.
bool tries_staging(const call_facts& call) noexcept;

}  // namespace pinflow::detail
