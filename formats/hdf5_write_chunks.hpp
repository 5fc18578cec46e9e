#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "formats/hdf5_chunk_grid.hpp"
#include "pinflow/array.hpp"

/// Elements in C order, cut into the chunks of a dataset, each of them shuffled and deflated: without
/// libhdf5.
namespace pinflow::detail {

/// The chunks of a dataset whose owner asks for none in particular: as many of the elements that follow each
/// other as 1 MiB holds, whole rows if they are smaller. So from the last axis on, each length is the axis's
/// own while that fits; the first that does not is what fits; those before it are 1. The shape has axes, and
/// none of its lengths is 0.
shape_vector hdf5_default_chunk_shape(const shape_vector& shape, std::uint64_t element_bytes);

/// Stores one chunk: the indices of its first element, which filters were skipped (bit 0 shuffle, bit 1
/// deflate), and the bytes as they are to be stored.
using hdf5_store_chunk = std::function<void(std::span<const std::uint64_t> first_element,
                                            std::uint32_t filter_mask, std::span<const std::byte> stored)>;

/// Cuts the elements of one dataset into chunks, encodes several of those side by side on all cores, and has
/// them stored in their order. Chunks at the edges are full-size, with zeros for what lies outside; those
/// that do not shrink are stored as they are.
///
/// Takes memory for the rows of one band of chunks (the chunks that share the same rows; leading axes along
/// which chunks have length 1 do not enlarge it). With enough cores it takes up to 64 MiB more for rows, and
/// three times as much for encoding. Not thread-safe. `store` is called by one thread at a time, not always
/// by the one that calls `write`.
class hdf5_chunk_writer {
 public:
    /// `shape` and `chunk_shape` have equally many axes, no length is 0, and no chunk is longer than the
    /// dataset. `deflate_level` is libdeflate's, 1 to 12.
    hdf5_chunk_writer(const shape_vector& shape, const shape_vector& chunk_shape, std::uint64_t element_bytes,
                      unsigned deflate_level, hdf5_store_chunk store);
    hdf5_chunk_writer(const hdf5_chunk_writer&) = delete;
    hdf5_chunk_writer& operator=(const hdf5_chunk_writer&) = delete;
    ~hdf5_chunk_writer();

    /// Takes the bytes that come next, cut anywhere, not more than are left. With the last of them all chunks
    /// are stored. @throws what `store` throws; then nothing more can be written.
    void write(std::span<const std::byte> bytes);

 private:
    struct encoder;

    hdf5_chunk_writer(std::size_t grid_axis, const shape_vector& shape, const shape_vector& chunk_shape,
                      std::uint64_t element_bytes, unsigned deflate_level, hdf5_store_chunk store);
    std::uint64_t band_begin(std::uint64_t band) const noexcept;
    std::uint64_t band_rows(std::uint64_t band) const noexcept;
    void begin_batch();
    void store_batch();
    void encode(std::uint64_t chunk, encoder& by) const;
    shape_vector first_element(std::uint64_t chunk) const;

    // The axes before grid_axis_, along which chunks have a length of 1, are one: its indices are blocks,
    // each of them a grid of chunks, whose bands follow each other in the bytes.
    std::size_t grid_axis_;
    shape_vector block_shape_;  ///< the lengths of those axes
    hdf5_chunk_grid grid_;
    hdf5_row_box box_;  ///< all of a row
    std::uint64_t bands_per_block_;
    std::uint64_t band_count_;
    std::uint64_t element_bytes_;
    unsigned deflate_level_;
    hdf5_store_chunk store_;

    // a batch is whole bands, and the bytes of them that have come so far
    std::uint64_t max_batch_bands_;
    std::uint64_t first_band_ = 0;
    std::uint64_t end_band_ = 0;
    std::uint64_t batch_bytes_ = 0;
    std::uint64_t collected_bytes_ = 0;
    std::unique_ptr<std::byte[]> batch_;
    std::vector<std::unique_ptr<encoder>> encoders_;
};

/// Lays the bytes of elements apart, as HDF5's shuffle filter does: all first bytes, all second ones, ....
/// `elements` are whole ones; `destination` is as large, and elsewhere.
void hdf5_shuffle(std::span<const std::byte> elements, std::uint64_t element_bytes,
                  std::byte* destination) noexcept;

}  // namespace pinflow::detail
