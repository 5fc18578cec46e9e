#pragma once

#include <cstdint>
#include <span>

#include "pinflow/device.hpp"
#include "src/rows/transfer_planner.hpp"

/// Decides the sizes of the pipeline's parts, with pure functions of facts.
namespace pinflow::detail {

/// The number of batches that are filled, copied and announced together, and the slots for them.
struct group_plan {
    unsigned batches = 1;     ///< the most batches of one group
    unsigned max_slots = 0;   ///< the most slots, unless loader_options::slots is set
    unsigned max_filled = 0;  ///< the most groups that are filled at the same time; 0: as many as slots form
};
/// `arrays` have the plans of plan_sample.
group_plan plan_groups(const sample_facts& sample, std::span<const sample_array> arrays,
                       std::uint64_t batch_bytes);

/// The current work of the CPU.
struct work_facts {
    bool needs_cpu = false;  ///< the CPU gathers rows of some array
    bool registers = false;  ///< pages are being registered at the same time
    bool is_in_order = false;
    std::uint64_t sample_bytes = 0;  ///< that cross the link
};
/// The number of threads that run the stages of a loader that has `threads` threads.
unsigned count_threads(const work_facts& work, unsigned threads) noexcept;

/// Whether `next` blocks the calling thread for the data of groups of `group_bytes`, instead of only its
/// stream.
bool next_waits_for_data(device_kind kind, std::uint64_t group_bytes) noexcept;

}  // namespace pinflow::detail
