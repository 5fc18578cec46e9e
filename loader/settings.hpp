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

/// Checks the sources and returns them.
/// @throws invalid_argument if there are none, if one is null or inconsistent, or if row counts differ;
/// unsupported for more than 2^30 rows if all sources have rows of 0 bytes.
std::vector<std::shared_ptr<const row_source>> checked(
    std::vector<std::shared_ptr<const row_source>> sources);

/// Completes the options from the data. The result has a sampler, and `order` is the sampler's order.
/// @throws invalid_argument if one is invalid, or if they contradict each other or the sources.
loader_options resolved(loader_options options, sources_view sources);

/// The layout of a batch's arrays in one side of a slot.
struct slot_layout {
    std::uint64_t row_count = 0;               ///< rows of the largest batch
    std::vector<std::uint64_t> array_offsets;  ///< in bytes
    std::uint64_t side_bytes = 0;
};
/// @throws invalid_argument if a batch is too large for 64 bits.
slot_layout lay_out(sources_view sources, const loader_options& options);

/// The memory available to the slots.
struct slot_budget {
    std::uint64_t setting_bytes = 0;    ///< loader_options::memory_bytes
    std::uint64_t available_bytes = 0;  ///< of host memory, as available_memory::size_bytes
    std::string_view bound;             ///< as available_memory::bound
};
slot_budget find_budget(const loader_options& options);
/// The most bytes of the staging buffers that all batches share: a quarter of the memory setting, which
/// counts as 1 GiB if it is 0, or an eighth of the available memory if that is less.
std::uint64_t max_staging_bytes(const slot_budget& budget) noexcept;

/// Facts for the planner. `rows_left` is the number of rows still to be delivered, `threads` the number of
/// threads that the loader may use.
sample_facts facts_of_sample(const loader_options& options, const slot_layout& layout,
                             const slot_budget& budget, unsigned threads);
std::vector<array_facts> facts_of_arrays(sources_view sources, std::uint64_t rows_left);

/// Chooses the number of slots, as the memory allows, and the sides that these plans need.
/// @throws invalid_argument if `options.slots` slots (2 if it is 0) exceed the memory set in the options, or
/// if the size of all slots exceeds 64 bits.
/// @throws system_failure if they exceed the available memory.
slot_sizes size_slots(const loader_options& options, sources_view sources, const slot_layout& layout,
                      const slot_budget& budget, std::span<const transfer_plan> plans,
                      const group_plan& groups, const staging_plan& staging);

}  // namespace pinflow::detail
