#pragma once

#include <vector>

namespace pinflow::detail {

/// Appends `next`, or joins it with the last copy if `next` continues that copy at both ends. CUDA refuses
/// copies across two allocations, which may lie side by side, so the caller must know that both copies are
/// within the same allocations.
/// @tparam Range copy_range or host_copy_range
template <typename Range>
void append_joined(std::vector<Range>& copies, const Range& next) {
    if (!copies.empty()) {
        Range& last = copies.back();
        if (last.source + last.size_bytes == next.source &&
            last.destination + last.size_bytes == next.destination) {
            last.size_bytes += next.size_bytes;
            return;
        }
    }
    copies.push_back(next);
}

}  // namespace pinflow::detail
