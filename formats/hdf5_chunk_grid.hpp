#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "pinflow/array.hpp"

namespace pinflow::detail {

/// Maps the elements of a dataset to chunks: a grid of boxes of one shape. Boxes at the end of an axis may
/// extend past the dataset. A band is the set of chunks that share an index along the first axis, and so hold
/// the same rows. A column is the number of a chunk within its band. Immutable.
class hdf5_chunk_grid {
 public:
    static constexpr std::size_t max_axes = 64;  ///< 32 of HDF5, and the axes of an array type

    /// @throws format_error for shapes without axes, with too many axes or of different ranks, for chunks
    /// without bytes, and for 2^64 bytes or chunks, or more.
    hdf5_chunk_grid(shape_vector shape, shape_vector chunk_shape, std::uint64_t item_bytes);

    const shape_vector& shape() const noexcept { return shape_; }
    const shape_vector& chunk_shape() const noexcept { return chunk_shape_; }
    std::uint64_t item_bytes() const noexcept { return item_bytes_; }
    std::uint64_t chunk_bytes() const noexcept { return rows_per_chunk() * chunk_row_bytes_; }
    std::uint64_t chunk_count() const noexcept { return chunk_count_; }
    std::uint64_t rows_per_chunk() const noexcept { return chunk_shape_[0]; }
    std::uint64_t chunks_per_band() const noexcept { return chunks_per_band_; }
    /// Bytes of a chunk's part of one row; the same for chunks at the edges.
    std::uint64_t chunk_row_bytes() const noexcept { return chunk_row_bytes_; }
    /// Whether a chunk holds whole, contiguous rows.
    bool holds_whole_rows() const noexcept;
    /// The number of chunks along one axis.
    std::uint64_t chunks_along(std::size_t axis) const noexcept;
    /// The position of the first element of chunk `index`; chunks are numbered in C order.
    shape_vector first_element(std::uint64_t index) const;

 private:
    shape_vector shape_;
    shape_vector chunk_shape_;
    std::uint64_t item_bytes_;
    std::uint64_t chunk_row_bytes_ = 0;
    std::uint64_t chunks_per_band_ = 0;
    std::uint64_t chunk_count_ = 0;
};

/// A decoded chunk that is still shuffled.
struct hdf5_shuffled_chunk {
    const std::byte* data;
    std::uint64_t size_bytes;
    std::uint64_t element_bytes;
};

/// The part of a box that one chunk holds: the same bytes of each row, with offsets that are computed once.
struct hdf5_chunk_part {
    struct axis {
        std::uint64_t count;
        std::uint64_t source_stride;
        std::uint64_t destination_stride;
    };

    std::uint64_t column = 0;
    std::uint64_t source_offset = 0;       ///< of the first byte in a row of the chunk
    std::uint64_t source_bytes = 0;        ///< from that byte to the last
    std::uint64_t destination_offset = 0;  ///< of the first byte in a row of the box
    std::uint64_t unit_bytes = 0;          ///< contiguous in both
    std::size_t axis_count = 0;
    std::array<axis, hdf5_chunk_grid::max_axes> axes{};  ///< over units, from the outermost to the innermost

    /// Copies `rows` rows, `source_stride` bytes apart, to rows `destination_stride` bytes apart.
    /// @param source the first byte of the part in the first row.
    /// @param destination the beginning of the first row of the box.
    void copy(const std::byte* source, std::uint64_t source_stride, std::byte* destination,
              std::uint64_t destination_stride, std::uint64_t rows) const noexcept;
    /// The same from a chunk that is still shuffled. An item of the grid has one or more shuffled elements.
    /// @param source the offset that the part's first byte, in the first row, would have in the unshuffled
    /// chunk.
    void copy_shuffled(const hdf5_shuffled_chunk& chunk, std::uint64_t source, std::uint64_t source_stride,
                       std::byte* destination, std::uint64_t destination_stride,
                       std::uint64_t rows) const noexcept;
    /// The number of units in one row.
    std::uint64_t units_per_row() const noexcept;
    /// Fills the bytes that `copy` would write with copies of one element, or with zeros if `element` is
    /// empty.
    void fill(std::span<const std::byte> element, std::byte* destination, std::uint64_t destination_stride,
              std::uint64_t rows) const noexcept;
};

/// A box of elements of each row: [begin, end) along every axis after the first.
class hdf5_row_box {
 public:
    /// Whole rows. `grid` must outlive the box.
    explicit hdf5_row_box(const hdf5_chunk_grid& grid);
    /// `begin` and `end` have one number for each axis but the first. No range may be empty or exceed the
    /// shape.
    hdf5_row_box(const hdf5_chunk_grid& grid, shape_vector begin, shape_vector end);

    /// Bytes of one row of the box.
    std::uint64_t row_bytes() const noexcept { return row_bytes_; }
    /// The number of chunks of each band that have a part in the box.
    std::uint64_t part_count() const noexcept { return part_count_; }
    hdf5_chunk_part part(std::uint64_t index) const noexcept;

 private:
    const hdf5_chunk_grid& grid_;
    shape_vector begin_;
    shape_vector end_;
    std::uint64_t row_bytes_ = 0;
    std::uint64_t part_count_ = 1;
};

/// Fills `destination` with copies of `element`, or with zeros if `element` is empty.
void fill_elements(std::span<std::byte> destination, std::span<const std::byte> element) noexcept;

}  // namespace pinflow::detail
