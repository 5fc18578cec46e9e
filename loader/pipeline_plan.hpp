#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "src/rows/link_profile.hpp"
#include "src/rows/transfer_planner.hpp"

/// Decides the sizes of the pipeline's parts, with pure functions of facts.
namespace pinflow::detail {

/// The number of batches that are filled, copied and announced together, and the slots for them.
struct group_plan {
    unsigned batches = 1;     ///< the most batches of one group
    unsigned max_slots = 0;   ///< the most slots, unless loader_options::slots is set
    unsigned max_filled = 0;  ///< the most groups that are filled at the same time; 0: as many as slots form
};
/// `plans` are those that plan_staging has marked.
group_plan plan_groups(const sample_facts& sample, std::span<const transfer_plan> plans,
                       std::uint64_t batch_bytes, const link_profile& profile = {});

/// The staging buffers that all batches share.
struct staging_plan {
    std::size_t count = 0;
    std::uint64_t buffer_bytes = 0;

    std::uint64_t size_bytes() const noexcept { return count * buffer_bytes; }
};
/// Plans the buffers, and marks the plans of the arrays whose rows pass through them: on a GPU, if each array
/// that is not held is staged, read, or copied by the copy engine from pages that are registered meanwhile,
/// if each of these rows fits into a buffer, and if an array has long batches.
/// @param max_bytes memory for the buffers: none are planned if they would take more
staging_plan plan_staging(const sample_facts& sample, std::span<const array_facts> arrays,
                          std::span<transfer_plan> plans, std::uint64_t max_bytes,
                          const link_profile& profile = {});

/// The current work of the CPU.
struct work_facts {
    bool needs_cpu = false;  ///< the CPU gathers rows of some array
    bool registers = false;  ///< pages are being registered at the same time
};
/// The number of threads that run the stages of a loader that has `threads` threads.
unsigned count_threads(const work_facts& work, unsigned threads, const link_profile& profile = {}) noexcept;

/// Whether `next` blocks the calling thread for the data of groups of `group_bytes`, instead of only its
/// stream.
bool next_waits_for_data(bool on_host, std::uint64_t group_bytes, const link_profile& profile = {}) noexcept;

}  // namespace pinflow::detail
