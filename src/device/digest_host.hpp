#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "src/device/backend.hpp"

namespace pinflow::detail {

/// The digest (see pinflow/loader/digest.hpp) of `row_count` samples in host memory, computed on all cores.
/// Without the fault guard, rows whose file was truncated raise SIGBUS.
/// @return nothing if a mapped file has lost pages of these rows.
std::optional<std::uint64_t> digest_of_rows(std::span<const digest_array> arrays, std::uint64_t row_count);

}  // namespace pinflow::detail
