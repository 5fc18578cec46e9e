#pragma once

#include <cstdint>

#include "src/device/row_work.hpp"

/// Gathers and scatters rows on the host device, on all cores except in `gather_held` and `record_wrong_ids`.
/// `gather` implements device_backend::gather_rows, and so on.
namespace pinflow::detail::host_rows {

void check(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count, index_errors* errors);
void sort(const std::uint64_t* ids, std::uint64_t count, std::uint64_t* sorted_ids, std::uint32_t* positions);
void refuse_repeated(const row_order& order, index_errors* errors);
void record_wrong_ids(const std::uint64_t* ids, index_errors* errors);
void gather(const row_transfer& transfer);
void gather_held(const held_gather& gather);
void repeat(const row_transfer& transfer);
void scatter(const row_transfer& transfer, repeated_rows repeated, sum_type type);

}  // namespace pinflow::detail::host_rows
