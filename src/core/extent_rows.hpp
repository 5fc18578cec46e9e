#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "pinflow/row_source.hpp"
#include "src/core/side_by_side_mapping.hpp"

namespace pinflow::detail {

/// Throws what row_source::read_rows throws for rows past the end, and for a destination of another size.
void check_row_request(const row_source& rows, std::span<const std::uint64_t> ids,
                       std::span<const std::byte> destination);

/// Maps the extents that lie in a file and are not mapped yet, side by side, and enters where. Neighbours in
/// one file share a mapping. @throws as side_by_side_mapping.
side_by_side_mapping map_extents(std::span<row_extent> extents, std::uint64_t row_size_bytes);

/// Whether all rows of a source lie in files as they are delivered; so do those of a source without rows.
bool lies_in_files(const row_source& source);

/// The rows of sources that lie in files, one after the other. Keeps their extents, mapped anew side by side,
/// and none of the sources but those without rows and extents, to have them checked. There is at least one
/// source, and all are alike.
/// @throws invalid_argument when the rows are more than 2^64; what map_extents throws.
std::shared_ptr<const row_source> make_extent_rows(
    std::span<const std::shared_ptr<const row_source>> sources);

/// "a to b (3 sources)".
std::string describe_sources(std::span<const std::shared_ptr<const row_source>> sources);

/// Throws invalid_argument: the rows of all sources, up to those of `last`, are too many to be numbered.
[[noreturn]] void refuse_row_count(std::span<const std::shared_ptr<const row_source>> sources,
                                   const row_source& last);

}  // namespace pinflow::detail
