#include "src/load/byte_runs.hpp"

#include <algorithm>

#include "src/rows/link_profile.hpp"

namespace pinflow::detail {

std::uint64_t byte_runs::offset_of(std::uint64_t byte) const {
    std::uint64_t offset = 0;
    if (!groups.empty()) {
        std::uint64_t group = byte / group_bytes();
        byte %= group_bytes();
        for (const group_axis& axis : groups) {
            offset += group % axis.count * axis.stride_bytes;
            group /= axis.count;
        }
    }
    return offset + byte / size_bytes * stride_bytes + byte % size_bytes;
}

byte_runs runs_of_box(std::span<const std::uint64_t> shape, std::span<const axis_range> part,
                      std::uint64_t element_bytes) {
    byte_runs runs{.size_bytes = element_bytes, .stride_bytes = element_bytes};
    // of one index of the axis. As in the strides of an array without elements, lengths of 0 count as 1.
    std::uint64_t index_bytes = element_bytes;
    std::vector<byte_runs::group_axis> axes;  // those with gaps between their indices
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        const std::uint64_t count = part[axis].end - part[axis].begin;
        runs.first_bytes += part[axis].begin * index_bytes;
        if (count == 1) {
            // its one index lies in `first_bytes`
        } else if (axes.empty() && index_bytes == runs.size_bytes) {
            runs.size_bytes *= count;
        } else if (!axes.empty() && index_bytes == axes.back().count * axes.back().stride_bytes) {
            axes.back().count *= count;
        } else {
            axes.push_back({count, index_bytes});
        }
        index_bytes *= std::max<std::uint64_t>(shape[axis], 1);
    }
    runs.stride_bytes = runs.size_bytes;
    if (axes.empty()) return runs;
    runs.count = axes.front().count;
    runs.stride_bytes = axes.front().stride_bytes;
    runs.groups.assign(axes.begin() + 1, axes.end());
    return runs;
}

bool are_long(const byte_runs& runs) {
    return runs.size_bytes >= thresholds.min_engine_bytes;
}

bool has_large_groups(const byte_runs& runs) {
    return runs.groups.empty() || runs.group_bytes() >= thresholds.min_group_bytes;
}

bool can_copy_runs(const byte_runs& runs) {
    const bool registers_gaps = runs.gap_bytes() <= max_registered_gap_bytes();
    const std::uint64_t cost_bytes =
        registers_gaps ? runs.stride_bytes : runs.size_bytes + thresholds.registering_call_bytes;
    return has_large_groups(runs) && runs.size_bytes >= thresholds.min_run_bytes &&
           cost_bytes / thresholds.max_registered_ratio <= runs.size_bytes;
}

std::uint64_t max_registered_gap_bytes() {
    return thresholds.registering_call_bytes;
}

bool reads_gaps(const byte_runs& runs) {
    return has_large_groups(runs) && runs.size_bytes >= thresholds.min_run_bytes &&
           runs.gap_bytes() < thresholds.read_call_bytes;
}

bool reads_and_drops_gaps(const byte_runs& runs) {
    // copying a run once more takes about a third of the time of reading it
    return runs.gap_bytes() + runs.size_bytes / 3 < thresholds.read_call_bytes;
}

}  // namespace pinflow::detail
