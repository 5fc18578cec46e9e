#pragma once

#include "loader/slot_group.hpp"
#include "loader/staging_buffers.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// Runs the CPU's jobs of a group, in parallel if there are several tasks. Rows that pass through staging
/// buffers are copied on `copies` as soon as a buffer is filled. An error stays with the slot of its job.
/// @param pool of the group's slots. Once it is stopped, the rest of the jobs is left undone.
/// @param buffers null if no job needs them.
/// @throws std::bad_alloc.
void run_jobs(slot_group& group, const slot_pool& pool, staging_buffers* buffers, stream_view copies);

}  // namespace pinflow::detail
