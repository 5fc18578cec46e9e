#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "pinflow/array.hpp"

namespace pinflow::detail {

/// How the elements of a dataset are spread over chunks: a grid of boxes of one shape, of which those at the
/// ends reach past the dataset. A band is the chunks of the grid that share an index along the first axis,
/// and so the same rows; a column is a chunk's number within its band. Immutable.
class hdf5_chunk_grid {
 public:
    static constexpr std::size_t max_axes = 64;  ///< 32 of HDF5's, and those of an array type

    /// @throws format_error for shapes without axes, with too many or of different ranks, chunks without
    /// elements, and for what passes 2^64 bytes or chunks.
    hdf5_chunk_grid(shape_vector shape, shape_vector chunk_shape, std::uint64_t item_bytes);

    const shape_vector& shape() const noexcept { return shape_; }
    const shape_vector& chunk_shape() const noexcept { return chunk_shape_; }
    std::uint64_t item_bytes() const noexcept { return item_bytes_; }
    std::uint64_t chunk_bytes() const noexcept { return rows_per_chunk() * chunk_row_bytes_; }
    std::uint64_t chunk_count() const noexcept { return chunk_count_; }
    std::uint64_t rows_per_chunk() const noexcept { return chunk_shape_[0]; }
    std::uint64_t chunks_per_band() const noexcept { return chunks_per_band_; }
    /// Of one row as far as a chunk holds it, edges included.
    std::uint64_t chunk_row_bytes() const noexcept { return chunk_row_bytes_; }
    /// Whether a chunk holds whole rows, one after the other.
    bool holds_whole_rows() const noexcept;
    /// Chunks along one axis.
    std::uint64_t chunks_along(std::size_t axis) const noexcept;
    /// The first element of the chunk `index`, counted in C order.
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

/// What one chunk has of the rows of a box: the same bytes of each row, in places that are worked out once.
struct hdf5_chunk_part {
    struct axis {
        std::uint64_t count;
        std::uint64_t source_stride;
        std::uint64_t destination_stride;
    };

    std::uint64_t column = 0;
    std::uint64_t source_offset = 0;       ///< of the first byte in a row of the chunk
    std::uint64_t source_bytes = 0;        ///< from there to the last one
    std::uint64_t destination_offset = 0;  ///< of the first byte in a row of the box
    std::uint64_t unit_bytes = 0;          ///< that are contiguous in both
    std::size_t axis_count = 0;
    std::array<axis, hdf5_chunk_grid::max_axes> axes{};  ///< over units, from the outermost to the innermost

    /// Copies `rows` rows that lie `source_stride` bytes apart to places `destination_stride` apart. `source`
    /// is the first one's first byte that is part of it, `destination` the beginning of a row of the box.
    void copy(const std::byte* source, std::uint64_t source_stride, std::byte* destination,
              std::uint64_t destination_stride, std::uint64_t rows) const noexcept;
    /// The same from a chunk that is still shuffled, in elements that make up items: `source` is the place
    /// that the first row's first byte would have.
    void copy_shuffled(const hdf5_shuffled_chunk& chunk, std::uint64_t source, std::uint64_t source_stride,
                       std::byte* destination, std::uint64_t destination_stride,
                       std::uint64_t rows) const noexcept;
    /// How many units one row has.
    std::uint64_t units_per_row() const noexcept;
    /// Fills the same places with one element, or with zeros when `element` is empty.
    void fill(std::span<const std::byte> element, std::byte* destination, std::uint64_t destination_stride,
              std::uint64_t rows) const noexcept;
};

/// A box of elements of each row: along every axis after the first, those from `begin` to before `end`.
class hdf5_row_box {
 public:
    /// Whole rows. `grid` must outlive the box.
    explicit hdf5_row_box(const hdf5_chunk_grid& grid);
    /// `begin` and `end` have a number for each axis but the first; none of the ranges is empty or passes the
    /// shape.
    hdf5_row_box(const hdf5_chunk_grid& grid, shape_vector begin, shape_vector end);

    /// Bytes of one row of it.
    std::uint64_t row_bytes() const noexcept { return row_bytes_; }
    /// Of each band, how many chunks have a part in it.
    std::uint64_t part_count() const noexcept { return part_count_; }
    hdf5_chunk_part part(std::uint64_t index) const noexcept;

 private:
    const hdf5_chunk_grid& grid_;
    shape_vector begin_;
    shape_vector end_;
    std::uint64_t row_bytes_ = 0;
    std::uint64_t part_count_ = 1;
};

/// Fills `destination` with one element, over and over, or with zeros when it is empty.
void fill_elements(std::span<std::byte> destination, std::span<const std::byte> element) noexcept;

}  // namespace pinflow::detail
