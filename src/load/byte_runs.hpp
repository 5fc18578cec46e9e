#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace pinflow::detail {

/// The indices of an axis: from begin to end - 1.
struct axis_range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

/// Where the elements of a tensor or of a part of it lie: `count` runs of `size_bytes`, `stride_bytes` apart,
/// from `first_bytes` on. Such a group of runs is repeated along other axes, if several axes leave gaps.
struct byte_runs {
    struct group_axis {
        std::uint64_t count = 1;
        std::uint64_t stride_bytes = 0;
    };

    std::uint64_t count = 1;
    std::uint64_t size_bytes = 0;
    std::uint64_t stride_bytes = 0;
    std::uint64_t first_bytes = 0;
    // NOLINTNEXTLINE(readability-redundant-member-init): g++ wants it
    std::vector<group_axis> groups = {};  ///< from the innermost axis outward

    bool is_contiguous() const { return count == 1 && groups.empty(); }
    std::uint64_t gap_bytes() const { return stride_bytes - size_bytes; }
    /// The bytes of a group, without gaps.
    std::uint64_t group_bytes() const { return count * size_bytes; }
    /// The offset from `first_bytes` of a byte of the part.
    std::uint64_t offset_of(std::uint64_t byte) const;
};

/// The runs of a box in an array in C order.
/// @param shape of the array
/// @param part the indices along each axis
byte_runs runs_of_box(std::span<const std::uint64_t> shape, std::span<const axis_range> part,
                      std::uint64_t element_bytes);

// Rules for runs with gaps between them.

/// Whether each run is long enough for a copy of its own. Shorter runs travel in strided copies.
bool are_long(const byte_runs& runs);
/// Whether each group has so many bytes that it is worth a strided copy of its own.
bool has_large_groups(const byte_runs& runs);
/// Whether the copy engine takes these runs from registered pages: groups are large, runs are long enough,
/// and registering does not cost too much.
bool can_copy_runs(const byte_runs& runs);
/// The longest gap whose pages are registered, too.
std::uint64_t max_registered_gap_bytes();
/// Whether runs for a GPU are read into a staging buffer with the gaps between them, and leave it in a
/// strided copy. Only if groups are large.
bool reads_gaps(const byte_runs& runs);
/// Whether runs are read with the gaps between them if the CPU then copies them once more.
bool reads_and_drops_gaps(const byte_runs& runs);

}  // namespace pinflow::detail
