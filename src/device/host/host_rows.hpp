#pragma once

#include <cstdint>

#include "src/device/row_work.hpp"

/// Gathers, scatters and groups rows on the host device, on all cores except in `sort`, `group` and
/// `gather_held`. `gather` implements device_backend::gather_rows, and so on.
namespace pinflow::detail::host_rows {

void check(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
           const error_memory& errors);
std::uint64_t sort_scratch_bytes(std::uint64_t count) noexcept;
void sort(const row_sort& sort);
void refuse_repeated(const row_order& order, const std::uint64_t* ids, const error_memory& errors);
void group(const row_grouping& grouping);
void gather(const row_transfer& transfer);
void gather_held(const held_gather& gather);
void repeat(const row_transfer& transfer);
void scatter(const row_transfer& transfer, repeated_rows repeated, sum_type type);

}  // namespace pinflow::detail::host_rows
