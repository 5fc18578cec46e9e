#pragma once

#include <cstdint>

#include "src/rows/exchange_state.hpp"
#include "src/rows/transfer_planner.hpp"

/// The facts about an exchange's calls, and the rates that are measured for them.
namespace pinflow::detail {

/// The rows of a call.
struct row_workload {
    row_direction direction = row_direction::gather;
    std::uint64_t count = 0;  ///< rows, of all batches together
    bool host_ids = true;
};

call_facts facts_of(const exchange_state& exchange, row_direction direction, bool host_ids);

/// The number of rows used to measure calls of `count` rows; at least 1.
std::uint64_t measured_rows(const row_table& table, std::uint64_t count) noexcept;

/// Chooses the plan for a call. If the choice needs rates, they are measured once per process and reused for
/// all exchanges with the same properties. Row counts and table sizes count as equal within a power of two.
/// If there is not enough memory for the measurement, the plan is a direct one, and the measurement is not
/// repeated. Called with the exchange's lock held.
/// @throws fatal_device_error.
rated_plan plan_rows(exchange_state& exchange, const row_workload& workload);

/// The number of batches like this one worth moving together: the smallest power of two, up to 64, whose rate
/// is within 3 % of the best; 1 if nothing is measured. Called with the exchange's lock held.
unsigned batches_worth_taking(exchange_state& exchange, const row_workload& batch);

/// Converts a plan to its public form.
row_plan to_row_plan(const rated_plan& rated);

}  // namespace pinflow::detail
