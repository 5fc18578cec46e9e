#include "src/core/strided_reader.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "pinflow/file.hpp"

namespace pinflow::detail {

namespace {

/// Gaps between units up to this size are read too. Storage and page cache read whole pages, so that reading
/// a gap of at most a page costs less than another read.
constexpr std::uint64_t max_gap_bytes = 4096;
/// From this size on, units are read directly to their destination.
constexpr std::uint64_t large_unit_bytes = 16 << 10;
/// Contiguous bytes to write at a time when reordering. Several cache lines, because two neighbouring writes
/// may both write to the line at their border.
constexpr std::uint64_t write_bytes = 256;
constexpr std::uint64_t cache_line_bytes = 64;

/// A plane of units: `outer_count` times `inner_count`, the inner ones next to each other in the destination.
struct plane {
    const std::byte* source;
    std::byte* destination;
    std::uint64_t outer_count, outer_source_stride, outer_destination_stride;
    std::uint64_t inner_count, inner_source_stride;
};

template <typename Size>
void copy_units(const plane& plane, Size unit_bytes) {
    for (std::uint64_t outer = 0; outer < plane.outer_count; ++outer) {
        const std::byte* from = plane.source + outer * plane.outer_source_stride;
        std::byte* to = plane.destination + outer * plane.outer_destination_stride;
        for (std::uint64_t inner = 0; inner < plane.inner_count; ++inner) {
            std::memcpy(to, from, unit_bytes);  // usually of a compile-time size
            from += plane.inner_source_stride;
            to += unit_bytes;
        }
    }
}

void copy_plane(const plane& plane, std::uint64_t unit_bytes) {
    switch (unit_bytes) {
        case 1:
            return copy_units(plane, std::integral_constant<std::size_t, 1>());
        case 2:
            return copy_units(plane, std::integral_constant<std::size_t, 2>());
        case 4:
            return copy_units(plane, std::integral_constant<std::size_t, 4>());
        case 8:
            return copy_units(plane, std::integral_constant<std::size_t, 8>());
        case 12:
            return copy_units(plane, std::integral_constant<std::size_t, 12>());
        case 16:
            return copy_units(plane, std::integral_constant<std::size_t, 16>());
        default:
            return copy_units(plane, unit_bytes);
    }
}

}  // namespace

/// One call of strided_reader::read.
class strided_read {
 public:
    strided_read(const strided_reader& reader, scratch_memory& scratch)
        : reader_(reader), scratch_(scratch) {}

    /// Reads the bytes [begin_bytes, begin_bytes + destination.size()) of one index of the axis above
    /// `level`, whose data begins at `source_bytes`.
    void read_range(std::size_t level, std::uint64_t source_bytes, std::uint64_t begin_bytes,
                    std::span<std::byte> destination);

    std::chrono::nanoseconds waited() const noexcept { return waited_; }

 private:
    /// An axis of a box. A box is some whole items of one axis of the array, and is read in tiles.
    struct box_axis {
        std::uint64_t count;
        std::uint64_t source_stride;
        std::uint64_t destination_stride;
        std::uint64_t tile = 1;         ///< how many indices are read together
        std::uint64_t tile_stride = 0;  ///< between indices, in the scratch memory
        std::uint64_t tile_count = 1;   ///< of the current tile, which may be cut off
    };

    void fetch(std::uint64_t source_bytes, std::span<std::byte> destination);
    void read_box(std::size_t level, std::uint64_t count, std::uint64_t source_bytes, std::byte* destination);
    void choose_tiles();
    void read_tiles(std::size_t depth, std::uint64_t source_bytes, std::byte* destination);
    void read_tile(std::uint64_t source_bytes, std::byte* destination);
    void copy_tile(std::size_t depth, const std::byte* source, std::byte* destination) const;

    const strided_reader& reader_;
    scratch_memory& scratch_;
    std::chrono::nanoseconds waited_{};

    // the current box
    std::vector<box_axis> axes_;  // from the largest stride in the source to the smallest
    std::size_t last_ = 0;        // the axis that is innermost as delivered
    std::size_t next_ = 0;        // of the other axes, the innermost in the source
    bool last_apart_ = false;     // whether its items are read one by one, since they lie far apart
};

strided_reader::strided_reader(array source)
    : strided_reader(source, shape_vector(source.shape().size()), source.shape()) {}

strided_reader::strided_reader(array source, const shape_vector& first, const shape_vector& lengths)
    : array_(std::move(source)),
      data_(array_.file() ? nullptr : array_.view().data()),
      unit_bytes_(array_.dtype().size_bytes()) {
    if (array_.size_bytes() == 0 || element_count(lengths) == 0) return;
    std::uint64_t item_bytes = unit_bytes_;
    for (std::size_t index = lengths.size(); index-- > 0;) {
        const auto stride = static_cast<std::uint64_t>(array_.strides_bytes()[index]);
        first_bytes_ += first[index] * stride;
        if (lengths[index] == 1) continue;
        if (axes_.empty() && stride == unit_bytes_) {
            unit_bytes_ *= lengths[index];
        } else if (!axes_.empty() && stride == axes_.front().count * axes_.front().stride_bytes) {
            axes_.front().count *= lengths[index];
        } else {
            axes_.insert(axes_.begin(), {lengths[index], stride, item_bytes});
        }
        item_bytes *= lengths[index];
    }
}

bool strided_reader::in_order() const noexcept {
    return std::ranges::is_sorted(axes_, std::ranges::greater(), &axis::stride_bytes);
}

std::uint64_t strided_reader::block_end(std::uint64_t begin_bytes, std::uint64_t max_bytes) const noexcept {
    for (const auto& [count, stride_bytes, item_bytes] : axes_) {
        if (item_bytes > max_bytes) continue;
        // divides the slices of an axis into parts of nearly equal size, so that all runs are long
        const std::uint64_t parts = (count - 1) / (max_bytes / item_bytes) + 1;
        const std::uint64_t part_bytes = ((count - 1) / parts + 1) * item_bytes;
        const std::uint64_t whole_bytes = count * item_bytes;
        return std::min(begin_bytes + part_bytes, (begin_bytes / whole_bytes + 1) * whole_bytes);
    }
    return begin_bytes - begin_bytes % unit_bytes_ + unit_bytes_;
}

std::chrono::nanoseconds strided_reader::read(std::uint64_t begin_bytes, std::span<std::byte> destination,
                                              scratch_memory& scratch) const {
    strided_read call(*this, scratch);
    call.read_range(0, first_bytes_, begin_bytes, destination);
    return call.waited();
}

void strided_read::fetch(std::uint64_t source_bytes, std::span<std::byte> destination) {
    if (destination.empty()) return;
    if (reader_.data_ != nullptr) {
        std::memcpy(destination.data(), reader_.data_ + source_bytes, destination.size());
    } else {
        waited_ += reader_.array_.file()->read(reader_.array_.offset_bytes() + source_bytes, destination);
    }
}

void strided_read::read_range(std::size_t level, std::uint64_t source_bytes, std::uint64_t begin_bytes,
                              std::span<std::byte> destination) {
    if (level == reader_.axes_.size()) return fetch(source_bytes + begin_bytes, destination);
    const auto& [axis_count, stride_bytes, item_bytes] = reader_.axes_[level];
    while (!destination.empty()) {
        const std::uint64_t index = begin_bytes / item_bytes;
        const std::uint64_t within_bytes = begin_bytes % item_bytes;
        const std::uint64_t count = within_bytes == 0 ? destination.size() / item_bytes : 0;
        std::uint64_t size_bytes = count * item_bytes;
        if (count > 1) {
            read_box(level, count, source_bytes + index * stride_bytes, destination.data());
        } else {
            size_bytes = std::min<std::uint64_t>(item_bytes - within_bytes, destination.size());
            read_range(level + 1, source_bytes + index * stride_bytes, within_bytes,
                       destination.first(size_bytes));
        }
        begin_bytes += size_bytes;
        destination = destination.subspan(size_bytes);
    }
}

/// Reads `count` whole items of an axis.
void strided_read::read_box(std::size_t level, std::uint64_t count, std::uint64_t source_bytes,
                            std::byte* destination) {
    axes_.clear();
    axes_.reserve(reader_.axes_.size() - level);
    for (std::size_t index = level; index < reader_.axes_.size(); ++index) {
        const auto& axis = reader_.axes_[index];
        axes_.push_back({index == level ? count : axis.count, axis.stride_bytes, axis.item_bytes});
    }
    std::ranges::sort(axes_, std::ranges::greater(), &box_axis::source_stride);
    last_ = static_cast<std::size_t>(std::ranges::min_element(axes_, {}, &box_axis::destination_stride) -
                                     axes_.begin());
    next_ = axes_.size() - (last_ + 1 == axes_.size() && axes_.size() > 1 ? 2 : 1);
    choose_tiles();
    read_tiles(0, source_bytes, destination);
}

/// Chooses the tiles. A tile is read before it is reordered: runs of neighbours along the axes of small
/// strides, and enough runs along the last axis to write whole cache lines.
void strided_read::choose_tiles() {
    box_axis& last = axes_[last_];
    const std::uint64_t last_tile =
        std::min(last.count, std::max<std::uint64_t>(write_bytes / reader_.unit_bytes_, 1));
    std::uint64_t run_bytes = reader_.unit_bytes_;
    last_apart_ = true;
    if (run_bytes < large_unit_bytes) {
        for (std::size_t index = axes_.size(); index-- > 0;) {
            box_axis& axis = axes_[index];
            if (axis.source_stride > run_bytes + max_gap_bytes) break;  // less than run_bytes: they overlap
            if (index == last_) last_apart_ = false;
            const std::uint64_t max_bytes =
                last_apart_ ? strided_reader::scratch_bytes / last_tile : strided_reader::scratch_bytes;
            if (run_bytes >= max_bytes) break;
            axis.tile = std::min(axis.count, (max_bytes - run_bytes) / axis.source_stride + 1);
            axis.tile_stride = axis.source_stride;
            run_bytes += (axis.tile - 1) * axis.source_stride;
            if (axis.tile < axis.count) break;
        }
    }
    if (!last_apart_) return;
    last.tile = last_tile;
    last.tile_stride = last.source_stride;
    if (reader_.data_ != nullptr) return;
    // an odd number of cache lines apart, so that the runs do not compete for the same cache sets
    last.tile_stride = ((run_bytes + cache_line_bytes - 1) / cache_line_bytes | 1) * cache_line_bytes;
}

void strided_read::read_tiles(std::size_t depth, std::uint64_t source_bytes, std::byte* destination) {
    if (depth == axes_.size()) return read_tile(source_bytes, destination);
    box_axis& axis = axes_[depth];
    for (std::uint64_t first = 0; first < axis.count; first += axis.tile) {
        axis.tile_count = std::min(axis.tile, axis.count - first);
        read_tiles(depth + 1, source_bytes + first * axis.source_stride,
                   destination + first * axis.destination_stride);
    }
}

void strided_read::read_tile(std::uint64_t source_bytes, std::byte* destination) {
    if (reader_.data_ != nullptr) return copy_tile(0, reader_.data_ + source_bytes, destination);
    std::uint64_t run_bytes = reader_.unit_bytes_;
    for (std::size_t index = 0; index < axes_.size(); ++index) {
        if (index == last_ && last_apart_) continue;
        run_bytes += (axes_[index].tile_count - 1) * axes_[index].source_stride;
    }
    if (!last_apart_) {
        std::byte* const run = scratch_.reserve(run_bytes);
        fetch(source_bytes, {run, run_bytes});
        return copy_tile(0, run, destination);
    }
    const box_axis& last = axes_[last_];
    const bool in_place = run_bytes == reader_.unit_bytes_;
    std::byte* const runs = in_place ? destination : scratch_.reserve(last.tile * last.tile_stride);
    const std::uint64_t stride_bytes = in_place ? last.destination_stride : last.tile_stride;
    for (std::uint64_t index = 0; index < last.tile_count; ++index) {
        fetch(source_bytes + index * last.source_stride, {runs + index * stride_bytes, run_bytes});
    }
    if (!in_place) copy_tile(0, runs, destination);
}

void strided_read::copy_tile(std::size_t depth, const std::byte* source, std::byte* destination) const {
    if (depth == axes_.size()) {
        const box_axis& last = axes_[last_];
        // besides the last axis, the one with the smallest stride in the source
        const box_axis* const next = axes_.size() == 1 ? nullptr : &axes_[next_];
        return copy_plane({source, destination, next ? next->tile_count : 1, next ? next->tile_stride : 0,
                           next ? next->destination_stride : 0, last.tile_count, last.tile_stride},
                          reader_.unit_bytes_);
    }
    if (depth == last_ || depth == next_) return copy_tile(depth + 1, source, destination);
    const box_axis& axis = axes_[depth];
    for (std::uint64_t index = 0; index < axis.tile_count; ++index) {
        copy_tile(depth + 1, source + index * axis.tile_stride,
                  destination + index * axis.destination_stride);
    }
}

}  // namespace pinflow::detail
