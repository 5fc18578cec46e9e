#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "src/device/backend.hpp"

namespace pinflow::detail {

/// The digest (see pinflow/loader/digest.hpp) of `row_count` samples in host memory, on all cores. Empty if
/// rows lie in the mapping of a file that has lost their pages; without the fault guard that ends the
/// process.
std::optional<std::uint64_t> digest_of_rows(std::span<const digest_array> arrays, std::uint64_t row_count);

}  // namespace pinflow::detail
