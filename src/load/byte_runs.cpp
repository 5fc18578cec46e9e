#include "src/load/byte_runs.hpp"

#include "src/rows/link_profile.hpp"

namespace pinflow::detail {

bool are_long(const byte_runs& runs) {
    return runs.size_bytes >= thresholds.min_engine_bytes;
}

bool can_copy_runs(const byte_runs& runs) {
    const bool registers_gaps = runs.gap_bytes() <= max_registered_gap_bytes();
    const std::uint64_t cost_bytes =
        registers_gaps ? runs.stride_bytes : runs.size_bytes + thresholds.registering_call_bytes;
    return runs.size_bytes >= thresholds.min_run_bytes &&
           cost_bytes / thresholds.max_registered_ratio <= runs.size_bytes;
}

std::uint64_t max_registered_gap_bytes() {
    return thresholds.registering_call_bytes;
}

bool reads_gaps(const byte_runs& runs) {
    return runs.size_bytes >= thresholds.min_run_bytes && runs.gap_bytes() < thresholds.read_call_bytes;
}

bool reads_and_drops_gaps(const byte_runs& runs) {
    // copying a run once more takes about a third of the time of reading it
    return runs.gap_bytes() + runs.size_bytes / 3 < thresholds.read_call_bytes;
}

}  // namespace pinflow::detail
