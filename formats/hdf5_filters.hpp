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

/// The filters of HDF5's chunks, undone without libhdf5. What is thrown here knows neither file nor chunk: it
/// continues where a sentence that begins with the chunk's name leaves off ("is damaged: its checksum is cut
/// off").
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

/// What fletcher32 adds to a chunk.
inline constexpr std::uint64_t checksum_bytes = 4;

/// Whether this build has liblzf.
bool knows_lzf() noexcept;

/// Why pinflow's own code cannot undo these filters, naming the first that it does not know; empty when it
/// can.
std::string not_decoded_reason(std::span<const hdf5_filter> filters);

/// What was done to the chunks of one dataset, checked once. Thread-safe.
class hdf5_pipeline {
 public:
    /// For chunks of `chunk_bytes`, decoded. @throws unsupported for a filter that is not known here,
    /// format_error for parameters that make no sense; both are full sentences but for path and dataset.
    hdf5_pipeline(std::span<const hdf5_filter> filters, std::uint64_t chunk_bytes);

    std::uint64_t chunk_bytes() const noexcept { return chunk_bytes_; }
    /// Whether chunks of which these filters were skipped lie in the file as they are.
    bool stored_as_is(std::uint32_t filter_mask) const noexcept;
    /// The size of elements whose bytes lie apart once all other filters of such a chunk are undone; 0 when
    /// shuffling is not what was done to it first, or does nothing.
    std::uint64_t shuffled_bytes(std::uint32_t filter_mask) const noexcept;
    /// Whether a stored chunk of this size can be a whole chunk, neither too long nor too short for what
    /// compression can do: to be asked before memory for either is taken. @throws format_error.
    void check_size(const hdf5_chunk& chunk) const;

 private:
    friend class hdf5_chunk_decoder;

    enum class method : std::uint8_t { deflate, shuffle, fletcher32, lzf };
    struct step {
        method how;
        std::uint32_t mask_bit;
        std::uint32_t element_bytes;  ///< shuffle
    };
    /// A step that was not skipped, and what undoing it has to make.
    struct stage {
        step what;
        std::uint64_t output_bytes;
        bool exact;  ///< or the most that it can be
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

/// Decodes chunks one after the other, in memory that it keeps from one to the next. For one thread at a
/// time.
class hdf5_chunk_decoder {
 public:
    hdf5_chunk_decoder();
    hdf5_chunk_decoder(const hdf5_chunk_decoder&) = delete;
    hdf5_chunk_decoder& operator=(const hdf5_chunk_decoder&) = delete;
    ~hdf5_chunk_decoder();

    /// Memory for a chunk as it is stored, until the next call.
    std::span<std::byte> stored_memory(std::uint64_t size_bytes);
    /// Fills `destination`, one chunk, from the bytes stored for it.
    /// @throws format_error for damaged bytes; the destination's contents are anything then.
    void decode(const hdf5_pipeline& pipeline, std::uint32_t filter_mask, std::span<const std::byte> stored,
                std::span<std::byte> destination) {
        decode_down_to(0, pipeline, filter_mask, stored, destination);
    }
    /// The same, but for the shuffling that was done first: for those who want few elements, and put their
    /// bytes together themselves. Only where pipeline.shuffled_bytes(filter_mask) is not 0.
    void decode_shuffled(const hdf5_pipeline& pipeline, std::uint32_t filter_mask,
                         std::span<const std::byte> stored, std::span<std::byte> destination) {
        decode_down_to(1, pipeline, filter_mask, stored, destination);
    }
    /// What it keeps.
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
    std::array<scratch_memory, 2> spare_;  // between two filters, by turns
    std::array<std::uint64_t, 2> spare_bytes_{};
};

/// Puts the bytes of elements together that HDF5's shuffle filter laid apart: all first bytes, all second
/// ones, ..., then what is left of a last, incomplete element. `destination` is as large, and elsewhere.
void hdf5_unshuffle(std::span<const std::byte> shuffled, std::uint64_t element_bytes,
                    std::byte* destination) noexcept;

/// The same for `count` elements: `first_plane` is the first byte of the first one, and each further one of
/// its bytes is `plane_bytes` after the one before.
void hdf5_unshuffle(const std::byte* first_plane, std::uint64_t plane_bytes, std::uint64_t element_bytes,
                    std::uint64_t count, std::byte* destination) noexcept;

/// HDF5's checksum: Fletcher's over big-endian 16-bit words, modulo 65535, sums beginning at 0; an odd last
/// byte counts as the upper half of a word. The source is H5_checksum_fletcher32 in libhdf5.
std::uint32_t hdf5_fletcher32(std::span<const std::byte> bytes) noexcept;

}  // namespace pinflow::detail
