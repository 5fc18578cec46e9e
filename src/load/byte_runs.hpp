#pragma once

#include <cstdint>

namespace pinflow::detail {

/// Where the elements of a tensor or slice lie: `count` runs of `size_bytes`, `stride_bytes` apart, from
/// `first_bytes` on.
struct byte_runs {
    std::uint64_t count = 1;
    std::uint64_t size_bytes = 0;
    std::uint64_t stride_bytes = 0;
    std::uint64_t first_bytes = 0;

    std::uint64_t gap_bytes() const { return stride_bytes - size_bytes; }
};

// Rules for runs with gaps between them.

/// Whether each run is long enough for a copy of its own. Shorter runs travel in strided copies.
bool are_long(const byte_runs& runs);
/// Whether the copy engine takes these runs from registered pages: they are long enough, and registering does
/// not cost too much.
bool can_copy_runs(const byte_runs& runs);
/// The longest gap whose pages are registered, too.
std::uint64_t max_registered_gap_bytes();
/// Whether runs for a GPU are read into a staging buffer with the gaps between them, and leave it in a
/// strided copy.
bool reads_gaps(const byte_runs& runs);
/// Whether runs are read with the gaps between them if the CPU then copies them once more.
bool reads_and_drops_gaps(const byte_runs& runs);

}  // namespace pinflow::detail
