#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/hdf5_description.hpp"
#include "src/core/strided_reader.hpp"

/// Decodes HDF5 chunks without libhdf5. Error messages here name neither file nor chunk: they continue a
/// sentence that begins with the chunk's name ("is damaged: its checksum is truncated").
namespace pinflow::detail {

/// Numbers of filters, from the HDF Group's registry.
namespace filter_id {
inline constexpr std::int32_t deflate = 1;
inline constexpr std::int32_t shuffle = 2;
inline constexpr std::int32_t fletcher32 = 3;
inline constexpr std::int32_t szip = 4;
inline constexpr std::int32_t nbit = 5;
inline constexpr std::int32_t scaleoffset = 6;
inline constexpr std::int32_t lzf = 32000;
}  // namespace filter_id

/// Bytes that fletcher32 adds to a chunk.
inline constexpr std::uint64_t checksum_bytes = 4;

/// Whether this build has liblzf.
bool knows_lzf() noexcept;

/// Why pinflow's own code cannot undo these filters: names the first unknown filter. Empty if it can.
std::string not_decoded_reason(std::span<const hdf5_filter> filters);

/// The filters of the chunks of one dataset, checked once. Thread-safe.
class hdf5_pipeline {
 public:
    /// `chunk_bytes` is the size of a decoded chunk.
    /// @throws unsupported for an unknown filter.
    /// @throws format_error for invalid parameters. Both messages are sentences without path and dataset.
    hdf5_pipeline(std::span<const hdf5_filter> filters, std::uint64_t chunk_bytes);

    std::uint64_t chunk_bytes() const noexcept { return chunk_bytes_; }
    /// Whether chunks with this filter mask are stored without any filter.
    bool stored_as_is(std::uint32_t filter_mask) const noexcept;
    /// The element size of the shuffle filter, if shuffle was applied first to chunks with this filter mask.
    /// 0 if it was not, if elements have one byte, or if the chunk size is no multiple of the element size.
    std::uint64_t shuffle_element_bytes(std::uint32_t filter_mask) const noexcept;
    /// Checks that the filters can give a chunk its stored size. Call it before allocating memory for the
    /// chunk.
    /// @throws format_error if the size is too large or too small.
    void check_size(const hdf5_chunk& chunk) const;

 private:
    friend class hdf5_chunk_decoder;

    enum class method : std::uint8_t { deflate, shuffle, fletcher32, lzf };
    struct step {
        method how;
        std::uint32_t mask_bit;
        std::uint32_t element_bytes;  ///< shuffle
    };
    /// A step that was not skipped, and the output size of undoing it.
    struct stage {
        step what;
        std::uint64_t output_bytes;
        bool exact;  ///< otherwise output_bytes is an upper bound
    };
    static constexpr std::size_t max_filters = 32;  ///< as many as a mask has bits

    /// The stages of a chunk, in the order in which they were applied.
    struct stage_list {
        std::array<stage, max_filters> stages;
        std::size_t count = 0;
        std::uint64_t stored_bytes = 0;
        bool exact = true;
    };
    stage_list stages_of(std::uint32_t filter_mask) const;

    std::uint64_t chunk_bytes_;
    std::vector<step> steps_;
};

/// Decodes chunks one after the other, and reuses its memory. For one thread at a time.
class hdf5_chunk_decoder {
 public:
    hdf5_chunk_decoder();
    hdf5_chunk_decoder(const hdf5_chunk_decoder&) = delete;
    hdf5_chunk_decoder& operator=(const hdf5_chunk_decoder&) = delete;
    ~hdf5_chunk_decoder();

    /// Memory for a stored chunk, valid until the next call.
    std::span<std::byte> stored_memory(std::uint64_t size_bytes);
    /// Fills `destination`, one chunk, from its stored bytes.
    /// @throws format_error for damaged bytes; the contents of the destination are then undefined.
    /// @throws std::bad_alloc.
    void decode(const hdf5_pipeline& pipeline, std::uint32_t filter_mask, std::span<const std::byte> stored,
                std::span<std::byte> destination) {
        decode_down_to(0, pipeline, filter_mask, stored, destination);
    }
    /// The same, but leaves the chunk shuffled, for callers that unshuffle only a few elements. Requires that
    /// pipeline.shuffle_element_bytes(filter_mask) is not 0.
    void decode_shuffled(const hdf5_pipeline& pipeline, std::uint32_t filter_mask,
                         std::span<const std::byte> stored, std::span<std::byte> destination) {
        decode_down_to(1, pipeline, filter_mask, stored, destination);
    }
    /// Bytes of memory that it holds.
    std::uint64_t memory_bytes() const noexcept { return stored_bytes_ + spare_bytes_[0] + spare_bytes_[1]; }

 private:
    struct decompressor;

    void decode_down_to(std::size_t first, const hdf5_pipeline& pipeline, std::uint32_t filter_mask,
                        std::span<const std::byte> stored, std::span<std::byte> destination);
    std::span<const std::byte> undo(const hdf5_pipeline::stage& stage, std::span<const std::byte> input,
                                    std::span<std::byte> output);
    std::span<const std::byte> inflate(const hdf5_pipeline::stage& stage, std::span<const std::byte> input,
                                       std::span<std::byte> output);

    std::unique_ptr<decompressor> decompressor_;  // from the first deflated chunk on
    scratch_memory stored_;
    std::uint64_t stored_bytes_ = 0;
    std::array<scratch_memory, 2> spare_;  // between two filters, alternating
    std::array<std::uint64_t, 2> spare_bytes_{};
};

/// Undoes HDF5's shuffle filter, which stores all first bytes of elements, then all second bytes, ..., then
/// the rest of an incomplete last element.
/// @param destination has the same size, and does not overlap `shuffled`.
void hdf5_unshuffle(std::span<const std::byte> shuffled, std::uint64_t element_bytes,
                    std::byte* destination) noexcept;

/// The same for `count` elements: byte i of the first element is at `first_plane` + i * `plane_bytes`.
void hdf5_unshuffle(const std::byte* first_plane, std::uint64_t plane_bytes, std::uint64_t element_bytes,
                    std::uint64_t count, std::byte* destination) noexcept;

/// HDF5's checksum: Fletcher-32 over big-endian 16-bit words, modulo 65535, with both sums starting at 0. An
/// odd last byte is the upper half of a word. The source is H5_checksum_fletcher32 in libhdf5.
std::uint32_t hdf5_fletcher32(std::span<const std::byte> bytes) noexcept;

}  // namespace pinflow::detail
