#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pinflow/loader/loader.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::detail {

using sources_view = std::span<const std::shared_ptr<const row_source>>;

/// @throws invalid_argument when there are none, when one is null and when row counts differ.
std::vector<std::shared_ptr<const row_source>> checked(
    std::vector<std::shared_ptr<const row_source>> sources);

/// The options with what they leave to the data: there is a sampler, and `order` is that one's.
/// @throws invalid_argument when they contradict each other or the sources.
loader_options resolved(loader_options options, sources_view sources);

/// How the arrays of a batch lie in one side of a slot.
struct slot_layout {
    std::uint64_t row_count = 0;               ///< of the largest batch
    std::vector<std::uint64_t> array_offsets;  ///< in bytes
    std::uint64_t side_bytes = 0;
};
/// @throws invalid_argument when a batch is too large for 64 bits.
slot_layout lay_out(sources_view sources, const loader_options& options);

/// How many slots of `each_bytes` the memory allows; more are of use where they are filled together.
/// @throws invalid_argument when it does not allow as many as are needed or asked for.
unsigned count_slots(const loader_options& options, std::uint64_t each_bytes, bool filled_together);

}  // namespace pinflow::detail
