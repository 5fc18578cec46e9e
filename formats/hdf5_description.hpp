#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/formats/listing.hpp"

/// What is known of the datasets of an HDF5 file, without any of libhdf5's handles: it can be written to
/// bytes in one process and read, and checked, in another.
namespace pinflow::detail {

/// One filter of a chunk's pipeline.
struct hdf5_filter {
    std::int32_t id = 0;  ///< of the HDF Group's registry: 1 deflate, 2 shuffle, 3 fletcher32, 32000 lzf
    std::string name;     ///< as the file gives it, for messages; may be empty
    std::vector<std::uint32_t> parameters;

    friend bool operator==(const hdf5_filter&, const hdf5_filter&) = default;
};

/// Where one chunk lies in the file. A chunk that was never written has no size, and zeros for the rest: its
/// elements are the fill value.
struct hdf5_chunk {
    std::uint64_t offset_bytes = 0;  ///< absolute, a user block included
    std::uint64_t size_bytes = 0;    ///< as it is stored
    std::uint32_t filter_mask = 0;   ///< bit i: filter i was skipped

    friend bool operator==(const hdf5_chunk&, const hdf5_chunk&) = default;
};

enum class hdf5_storage : std::uint8_t {
    contiguous,  ///< the elements lie in C order at offset_bytes
    chunked,     ///< in chunks, each of them chunk_shape elements in C order, also at the edges
    compact,     ///< among the metadata: the description brings the elements along, in compact_data
    absent,      ///< never written, or without elements: each is the fill value
    library,     ///< only libhdf5 can read it; library_reason says why
};

/// All that pinflow's own code needs to read one dataset. A dataset whose type is an array has the axes of
/// that array as its last ones, in shape and chunk_shape.
struct hdf5_description {
    std::string name;  ///< its path in the file, without a slash in front
    pinflow::dtype dtype = pinflow::dtype::of<std::byte>();  ///< as it is stored, byte order included
    shape_vector shape;
    hdf5_storage storage = hdf5_storage::absent;
    std::string library_reason;           ///< library: to be read after "it is read by libhdf5: "
    std::uint64_t offset_bytes = 0;       ///< contiguous: absolute, a user block included
    std::vector<std::byte> compact_data;  ///< compact: every element, in C order
    std::vector<std::byte> fill;          ///< one element; empty stands for zeros
    shape_vector chunk_shape;             ///< chunked; library: also, when there are chunks
    std::vector<hdf5_filter> filters;     ///< the same; in the order in which they were applied when writing
    std::vector<hdf5_chunk> chunks;       ///< chunked: one for each place in the grid of chunks, in C order

    friend bool operator==(const hdf5_description&, const hdf5_description&) = default;
};

/// The most chunks whose places a description lists; a dataset of more is read by the library.
inline constexpr std::uint64_t max_hdf5_chunks = std::uint64_t{1} << 24;

/// Above this number of chunks, libhdf5 first counts those that were written, which is slow. If only few
/// were, libhdf5 reads the dataset.
inline constexpr std::uint64_t many_hdf5_chunks = std::uint64_t{1} << 20;

/// What libhdf5 keeps decoded, at most, of a dataset that only it can read.
inline constexpr std::uint64_t hdf5_library_cache_bytes = std::uint64_t{64} << 20;

/// Bytes of the elements. @throws format_error when they are 2^63 or more.
std::uint64_t payload_bytes(const hdf5_description& description);

/// How many chunks the grid has along all axes together; empty when there are 2^64 or more. The shapes have
/// the same rank, and no length of a chunk is 0.
std::optional<std::uint64_t> hdf5_grid_size(const shape_vector& shape,
                                            const shape_vector& chunk_shape) noexcept;

/// The names of the filters in the order in which they were applied, safe for a sentence: "shuffle, deflate".
std::string hdf5_filter_names(const hdf5_description& description);

/// Why its bytes can or cannot be mapped as they are, in a sentence of its own: "it lies in chunks of shape
/// (64, 64), filtered by shuffle, deflate".
std::string hdf5_storage_reason(const hdf5_description& description);

/// The listing of a dataset for `inspect`. The description need not say where the chunks are.
array_listing hdf5_listing(const hdf5_description& description);

// ---- checked, written and read ---------------------------------------------------------------------------

/// Holds every count and offset against `file_size_bytes` and against each other, as a damaged file may have
/// said them: afterwards all that will be read lies in the file. Whether the filters are known, and a chunk
/// can be made of the bytes that are stored for it, is for hdf5_pipeline to say.
/// @throws format_error, a sentence without the path that begins "the dataset 'NAME'".
void check_hdf5_description(const hdf5_description& description, std::uint64_t file_size_bytes);

/// Bytes from which parse_hdf5_description makes the same again.
std::vector<std::byte> serialize(const hdf5_description& description);

/// A pure function of bytes, none of which is trusted: nothing is allocated that they do not fill, and what
/// they say is checked as above. @throws format_error, a sentence without the path.
hdf5_description parse_hdf5_description(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

/// The same for what inspect says of the datasets of a file.
std::vector<std::byte> serialize(std::span<const array_listing> listings);
std::vector<array_listing> parse_array_listings(std::span<const std::byte> bytes);

}  // namespace pinflow::detail
