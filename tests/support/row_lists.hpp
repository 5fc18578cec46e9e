#pragma once

#include <cstdint>
#include <vector>

#include "pinflow/loader/sampler.hpp"

using row_list = std::vector<std::uint64_t>;

/// The rows of a whole epoch.
inline row_list epoch_of(const pinflow::sampler& sampler, std::uint64_t epoch) {
    row_list rows(sampler.position_count());
    sampler.rows_at(epoch, 0, rows);
    return rows;
}
