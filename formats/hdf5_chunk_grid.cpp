#include "formats/hdf5_chunk_grid.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "formats/hdf5_filters.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow::detail {

hdf5_chunk_grid::hdf5_chunk_grid(shape_vector shape, shape_vector chunk_shape, std::uint64_t item_bytes)
    : shape_(std::move(shape)), chunk_shape_(std::move(chunk_shape)), item_bytes_(item_bytes) {
    if (shape_.empty() || shape_.size() > max_axes || shape_.size() != chunk_shape_.size()) {
        throw format_error(fmt::format("a dataset of {} axes cannot have chunks of {} axes", shape_.size(),
                                       chunk_shape_.size()));
    }
    const auto refuse = [&](const char* why) {
        throw format_error(fmt::format("a dataset of shape {} cannot be stored in chunks of shape {}: {}",
                                       to_string(shape_), to_string(chunk_shape_), why));
    };
    if (item_bytes_ == 0 || std::ranges::find(chunk_shape_, 0u) != chunk_shape_.end())
        refuse("a chunk has no bytes");
    chunk_row_bytes_ = item_bytes_;
    chunks_per_band_ = 1;
    // checks also the product of the lengths, with 0 counted as 1, so that no offset within the dataset
    // overflows
    std::uint64_t row_bytes = item_bytes_;
    bool fits = true;
    for (std::size_t axis = shape_.size() - 1; axis > 0; --axis) {
        fits = fits && multiply(chunk_row_bytes_, chunk_shape_[axis], chunk_row_bytes_) &&
               multiply(chunks_per_band_, chunks_along(axis), chunks_per_band_) &&
               multiply(row_bytes, std::max<std::uint64_t>(shape_[axis], 1), row_bytes);
    }
    std::uint64_t bytes = 0;
    if (!fits || !multiply(chunk_row_bytes_, rows_per_chunk(), bytes) ||
        !multiply(row_bytes, shape_[0], bytes) ||
        !multiply(chunks_per_band_, chunks_along(0), chunk_count_)) {
        refuse("the chunks are too large, or too many");
    }
}

std::uint64_t hdf5_chunk_grid::chunks_along(std::size_t axis) const noexcept {
    return shape_[axis] / chunk_shape_[axis] + (shape_[axis] % chunk_shape_[axis] != 0 ? 1 : 0);
}

bool hdf5_chunk_grid::holds_whole_rows() const noexcept {
    return std::equal(shape_.begin() + 1, shape_.end(), chunk_shape_.begin() + 1);
}

shape_vector hdf5_chunk_grid::first_element(std::uint64_t index) const {
    shape_vector result(shape_.size());
    for (std::size_t axis = shape_.size(); axis-- > 0;) {
        const std::uint64_t along = std::max<std::uint64_t>(chunks_along(axis), 1);
        result[axis] = index % along * chunk_shape_[axis];
        index /= along;
    }
    return result;
}

// ---- boxes ----------------------------------------------------------------------------------------------

hdf5_row_box::hdf5_row_box(const hdf5_chunk_grid& grid)
    : hdf5_row_box(grid, shape_vector(grid.shape().size() - 1),
                   shape_vector(grid.shape().begin() + 1, grid.shape().end())) {}

hdf5_row_box::hdf5_row_box(const hdf5_chunk_grid& grid, shape_vector begin, shape_vector end)
    : grid_(grid), begin_(std::move(begin)), end_(std::move(end)), row_bytes_(grid.item_bytes()) {
    for (std::size_t axis = 0; axis < begin_.size(); ++axis) {
        const std::uint64_t length = grid_.chunk_shape()[axis + 1];
        row_bytes_ *= end_[axis] - begin_[axis];
        part_count_ *= end_[axis] == 0 ? 0 : (end_[axis] - 1) / length + 1 - begin_[axis] / length;
    }
}

hdf5_chunk_part hdf5_row_box::part(std::uint64_t index) const noexcept {
    hdf5_chunk_part part;
    part.unit_bytes = grid_.item_bytes();
    part.source_bytes = grid_.item_bytes();
    std::uint64_t source_stride = grid_.item_bytes();
    std::uint64_t destination_stride = grid_.item_bytes();
    std::uint64_t columns = 1;
    for (std::size_t axis = begin_.size(); axis-- > 0;) {
        const std::uint64_t length = grid_.chunk_shape()[axis + 1];
        const std::uint64_t first = begin_[axis] / length;
        const std::uint64_t along = (end_[axis] - 1) / length + 1 - first;
        const std::uint64_t chunk = first + index % along;
        index /= along;
        part.column += chunk * columns;
        columns *= grid_.chunks_along(axis + 1);
        // the end of the last chunk may exceed 64 bits
        const std::uint64_t origin = chunk * length;
        const std::uint64_t from = std::max(begin_[axis], origin);
        const std::uint64_t count = std::min(end_[axis] - from, length - (from - origin));
        part.source_offset += (from - origin) * source_stride;
        part.destination_offset += (from - begin_[axis]) * destination_stride;
        part.source_bytes += (count - 1) * source_stride;
        // bytes that are contiguous in chunk and box are one unit
        if (part.axis_count == 0 && part.unit_bytes == source_stride &&
            part.unit_bytes == destination_stride) {
            part.unit_bytes *= count;
        } else if (count > 1) {
            part.axes[part.axis_count++] = {count, source_stride, destination_stride};
        }
        source_stride *= length;
        destination_stride *= end_[axis] - begin_[axis];
    }
    std::reverse(part.axes.begin(), part.axes.begin() + static_cast<std::ptrdiff_t>(part.axis_count));
    return part;
}

// ---- copying --------------------------------------------------------------------------------------------

namespace {

using part_axis = hdf5_chunk_part::axis;

/// Calls `use(source offset, destination)` for each unit.
template <typename Use>
void for_each_unit(std::span<const part_axis> axes, std::uint64_t source, std::byte* destination,
                   const Use& use) {
    if (axes.empty()) return use(source, destination);
    const part_axis& axis = axes.front();
    if (axes.size() == 1) {
        for (std::uint64_t index = 0; index < axis.count; ++index)
            use(source + index * axis.source_stride, destination + index * axis.destination_stride);
        return;
    }
    for (std::uint64_t index = 0; index < axis.count; ++index) {
        for_each_unit(axes.subspan(1), source + index * axis.source_stride,
                      destination + index * axis.destination_stride, use);
    }
}

template <typename Size>
void copy_units(std::span<const part_axis> axes, const std::byte* source, std::byte* destination,
                Size unit_bytes) {
    for_each_unit(axes, 0, destination, [&](std::uint64_t offset, std::byte* to) {
        std::memcpy(to, source + offset, unit_bytes);  // usually of a compile-time size
    });
}

/// The axes of a part over several rows: the rows are the first axis, unless they are contiguous.
class rows_of_part {
 public:
    rows_of_part(const hdf5_chunk_part& part, std::uint64_t source_stride, std::uint64_t destination_stride,
                 std::uint64_t rows)
        : unit_bytes_(part.unit_bytes) {
        if (part.axis_count == 0 && unit_bytes_ == source_stride && unit_bytes_ == destination_stride) {
            unit_bytes_ *= rows;
            return;
        }
        if (rows != 1) axes_[count_++] = {rows, source_stride, destination_stride};
        for (std::size_t index = 0; index < part.axis_count; ++index)
            axes_[count_++] = part.axes[index];
    }

    std::span<const part_axis> axes() const noexcept { return std::span(axes_).first(count_); }
    std::uint64_t unit_bytes() const noexcept { return unit_bytes_; }

 private:
    std::array<part_axis, hdf5_chunk_grid::max_axes> axes_;
    std::size_t count_ = 0;
    std::uint64_t unit_bytes_;
};

}  // namespace

void hdf5_chunk_part::copy(const std::byte* source, std::uint64_t source_stride, std::byte* destination,
                           std::uint64_t destination_stride, std::uint64_t rows) const noexcept {
    const rows_of_part all(*this, source_stride, destination_stride, rows);
    std::byte* const to = destination + destination_offset;
    switch (all.unit_bytes()) {
        case 1:
            return copy_units(all.axes(), source, to, std::integral_constant<std::size_t, 1>());
        case 2:
            return copy_units(all.axes(), source, to, std::integral_constant<std::size_t, 2>());
        case 4:
            return copy_units(all.axes(), source, to, std::integral_constant<std::size_t, 4>());
        case 8:
            return copy_units(all.axes(), source, to, std::integral_constant<std::size_t, 8>());
        case 16:
            return copy_units(all.axes(), source, to, std::integral_constant<std::size_t, 16>());
        default:
            return copy_units(all.axes(), source, to, all.unit_bytes());
    }
}

void hdf5_chunk_part::copy_shuffled(const hdf5_shuffled_chunk& chunk, std::uint64_t source,
                                    std::uint64_t source_stride, std::byte* destination,
                                    std::uint64_t destination_stride, std::uint64_t rows) const noexcept {
    const rows_of_part all(*this, source_stride, destination_stride, rows);
    const std::uint64_t plane_bytes = chunk.size_bytes / chunk.element_bytes;
    const std::uint64_t count = all.unit_bytes() / chunk.element_bytes;
    for_each_unit(all.axes(), source, destination + destination_offset,
                  [&](std::uint64_t from, std::byte* to) {
                      hdf5_unshuffle(chunk.data + from / chunk.element_bytes, plane_bytes,
                                     chunk.element_bytes, count, to);
                  });
}

std::uint64_t hdf5_chunk_part::units_per_row() const noexcept {
    std::uint64_t count = 1;
    for (std::size_t index = 0; index < axis_count; ++index)
        count *= axes[index].count;
    return count;
}

void hdf5_chunk_part::fill(std::span<const std::byte> element, std::byte* destination,
                           std::uint64_t destination_stride, std::uint64_t rows) const noexcept {
    // there is no source: the row stride of the destination stands in for that of the source
    const rows_of_part all(*this, destination_stride, destination_stride, rows);
    for_each_unit(all.axes(), 0, destination + destination_offset,
                  [&](std::uint64_t, std::byte* to) { fill_elements({to, all.unit_bytes()}, element); });
}

void fill_elements(std::span<std::byte> destination, std::span<const std::byte> element) noexcept {
    if (destination.empty()) return;
    if (element.size() <= 1) {
        std::memset(destination.data(), element.empty() ? 0 : std::to_integer<int>(element[0]),
                    destination.size());
        return;
    }
    std::size_t done = std::min(element.size(), destination.size());
    std::memcpy(destination.data(), element.data(), done);
    while (done < destination.size()) {
        const std::size_t count = std::min(done, destination.size() - done);
        std::memcpy(destination.data() + done, destination.data(), count);
        done += count;
    }
}

}  // namespace pinflow::detail
