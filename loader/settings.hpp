#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "loader/pipeline_plan.hpp"
#include "loader/slots.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::detail {

using sources_view = std::span<const std::shared_ptr<const row_source>>;

/// Checks the sources, and returns them.
/// @throws invalid_argument if there are none, if one is null or inconsistent, or if row counts differ;
/// unsupported for more than 2^30 rows if all sources have rows of 0 bytes.
sources_view checked(sources_view sources);

/// Completes the options from the data. The result has a sampler, and `order` is the sampler's order.
/// @throws invalid_argument if one is invalid, or if they contradict each other or the sources.
loader_options resolved(loader_options options, sources_view sources);

/// The arrays of a sample, with the planner's facts.
/// @param rows_left the number of rows still to be delivered
std::vector<sample_array> arrays_of(sources_view sources, std::uint64_t rows_left);

/// The size of a batch in one side of a slot.
struct slot_layout {
    std::uint64_t row_count = 0;  ///< rows of the largest batch
    std::uint64_t side_bytes = 0;
};
/// Sets the offset of each array, and returns the layout of a slot.
/// @throws invalid_argument if a batch is too large for 64 bits.
slot_layout lay_out(std::span<sample_array> arrays, const loader_options& options);

/// The memory available to the slots.
struct slot_budget {
    std::uint64_t setting_bytes = 0;    ///< loader_options::memory_bytes
    std::uint64_t available_bytes = 0;  ///< of host memory, as available_memory::size_bytes
    std::string_view bound;             ///< as available_memory::bound
};
slot_budget find_budget(const loader_options& options);

/// The planner's facts of a loader that may use `threads` threads, except the number of batches per epoch.
sample_facts facts_of_sample(const loader_options& options, const slot_layout& layout,
                             const slot_budget& budget, unsigned threads);

/// Chooses the number of slots, as the memory allows, and the sides that the plans of `arrays` need.
/// @throws invalid_argument if `options.slots` slots (2 if it is 0) exceed the memory set in the options, or
/// if the size of all slots exceeds 64 bits.
/// @throws system_failure if they exceed the available memory.
slot_sizes size_slots(const loader_options& options, std::span<const sample_array> arrays,
                      const slot_layout& layout, const slot_budget& budget, const group_plan& groups,
                      const staging_plan& staging);

}  // namespace pinflow::detail
