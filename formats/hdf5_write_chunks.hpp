#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "formats/hdf5_chunk_grid.hpp"
#include "pinflow/array.hpp"

/// Cuts elements in C order into the chunks of a dataset, and shuffles and deflates each chunk, without
/// libhdf5.
namespace pinflow::detail {

/// The default chunk shape: as many consecutive elements as fit into 1 MiB, in whole rows if a row is smaller
/// than that. From the last axis backwards, a chunk has the full length of each axis while that fits, then as
/// much of the next axis as fits, then length 1. `shape` must have axes, and no length may be 0.
shape_vector hdf5_default_chunk_shape(const shape_vector& shape, std::uint64_t element_bytes);

/// Stores one chunk.
/// @param first_element the indices of its first element.
/// @param filter_mask the skipped filters: bit 0 shuffle, bit 1 deflate.
/// @param stored the bytes to store.
using hdf5_store_chunk = std::function<void(std::span<const std::uint64_t> first_element,
                                            std::uint32_t filter_mask, std::span<const std::byte> stored)>;

/// Cuts the elements of one dataset into chunks, encodes several chunks in parallel on all cores, and stores
/// them in order. Chunks at the edges are full-size, with zeros outside the dataset. A chunk that does not
/// shrink is stored unfiltered.
///
/// A row is one index of the first axis along which chunks are longer than 1 (of the last axis if there is
/// none), at one index of each axis before it. A band is the set of chunks that hold the same rows.
///
/// The writer collects the elements of whole bands: enough bands for two chunks per core, or for 1 MiB of
/// chunks if that is more, and fewer if memory is short. The elements take at most 64 MiB, unless one band is
/// larger. Encoding takes three times the size of the chunks that are being encoded or wait to be stored.
/// These are at most 64 MiB of chunks, or one larger chunk.
///
/// Not thread-safe. `store` is called on one thread at a time, which need not be the thread that calls
/// `write`.
class hdf5_chunk_writer {
 public:
    /// `shape` and `chunk_shape` must have the same number of axes. No length may be 0, and no chunk may be
    /// longer than the dataset. `deflate_level` is libdeflate's, 1 to 12.
    /// @throws system_failure if a band of chunks and the encoding of one chunk take more memory than there
    /// is.
    hdf5_chunk_writer(const shape_vector& shape, const shape_vector& chunk_shape, std::uint64_t element_bytes,
                      unsigned deflate_level, hdf5_store_chunk store);
    hdf5_chunk_writer(const hdf5_chunk_writer&) = delete;
    hdf5_chunk_writer& operator=(const hdf5_chunk_writer&) = delete;
    ~hdf5_chunk_writer();

    /// Takes the next bytes, at most as many as are left; a piece may end anywhere. When the last byte has
    /// arrived, all chunks are stored.
    /// @throws what `store` throws, and std::bad_alloc; nothing more can be written after that.
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

    // The axes before grid_axis_, along which chunks have length 1, are treated as one axis of blocks. Each
    // block is a grid of chunks, and its bands are contiguous in the bytes.
    std::size_t grid_axis_;
    shape_vector block_shape_;  ///< the lengths of those axes
    hdf5_chunk_grid grid_;
    hdf5_row_box box_;  ///< a whole row
    std::uint64_t bands_per_block_;
    std::uint64_t band_count_;
    std::uint64_t element_bytes_;
    unsigned deflate_level_;
    hdf5_store_chunk store_;

    // a batch is a number of whole bands, of which collected_bytes_ have arrived
    std::uint64_t max_batch_bands_;
    std::uint64_t first_band_ = 0;
    std::uint64_t end_band_ = 0;
    std::uint64_t batch_bytes_ = 0;
    std::uint64_t collected_bytes_ = 0;
    std::unique_ptr<std::byte[]> batch_;
    std::vector<std::unique_ptr<encoder>> encoders_;
};

/// Shuffles as HDF5's filter does: stores all first bytes of elements, then all second bytes, ....
/// @param elements whole elements.
/// @param destination has the same size, and does not overlap `elements`.
void hdf5_shuffle(std::span<const std::byte> elements, std::uint64_t element_bytes,
                  std::byte* destination) noexcept;

}  // namespace pinflow::detail
