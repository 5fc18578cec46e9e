#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "pinflow/row_source.hpp"
#include "src/core/side_by_side_mapping.hpp"

namespace pinflow::detail {

/// Maps extents of files that are not mapped yet, side by side, and sets their `data`. Consecutive extents
/// of one file share a mapping. Extents that the system does not map keep a null `data`.
/// @return the mapping, which must live as long as `data` is used.
/// @throws as side_by_side_mapping.
side_by_side_mapping map_extents(std::span<row_extent> extents, std::uint64_t row_size_bytes);

/// Whether all rows of a source lie in files as they are delivered. True for a source without rows.
bool lies_in_files(const row_source& source);

/// Concatenates sources for which lies_in_files and has_contiguous_extents are true. Keeps their extents,
/// mapped again side by side, but not the sources (except sources without rows and extents, which it still
/// has to check). Requires at least one source; all must have the same type and row shape.
/// @throws invalid_argument for 2^64 rows or more; what map_extents throws.
std::shared_ptr<const row_source> make_extent_rows(
    std::span<const std::shared_ptr<const row_source>> sources);

/// "a to b (3 sources)".
std::string describe_sources(std::span<const std::shared_ptr<const row_source>> sources);

/// Throws invalid_argument: the sources up to `last` have 2^64 rows or more.
[[noreturn]] void refuse_row_count(std::span<const std::shared_ptr<const row_source>> sources,
                                   const row_source& last);

}  // namespace pinflow::detail
