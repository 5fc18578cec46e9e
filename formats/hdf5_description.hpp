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

/// Descriptions of the datasets of an HDF5 file, without libhdf5's handles. They can be serialised in one
/// process, and parsed and checked in another.
namespace pinflow::detail {

/// One filter of a chunk's pipeline.
struct hdf5_filter {
    std::int32_t id = 0;  ///< in the HDF Group's registry: 1 deflate, 2 shuffle, 3 fletcher32, 32000 lzf
    std::string name;     ///< as the file gives it, for messages; may be empty
    std::vector<std::uint32_t> parameters;

    friend bool operator==(const hdf5_filter&, const hdf5_filter&) = default;
};

/// The location of one chunk in the file. For a chunk that was never written, all members are 0; its elements
/// are the fill value.
struct hdf5_chunk {
    std::uint64_t offset_bytes = 0;  ///< absolute, including a user block
    std::uint64_t size_bytes = 0;    ///< as it is stored
    std::uint32_t filter_mask = 0;   ///< bit i: filter i was skipped

    friend bool operator==(const hdf5_chunk&, const hdf5_chunk&) = default;
};

enum class hdf5_storage : std::uint8_t {
    contiguous,  ///< the elements are in C order at offset_bytes
    chunked,     ///< in chunks of chunk_shape elements in C order, full-size also at the edges
    compact,     ///< within the metadata; compact_data has the elements
    absent,      ///< never written, or without elements; every element is the fill value
    library,     ///< only libhdf5 can read it; library_reason says why
};

/// Everything that pinflow's own code needs to read one dataset. If the type is an array, the axes of that
/// array are the last axes of shape and chunk_shape.
struct hdf5_description {
    std::string name;  ///< its path in the file, without a slash in front
    pinflow::dtype dtype = pinflow::dtype::of<std::byte>();  ///< as it is stored, byte order included
    shape_vector shape;
    hdf5_storage storage = hdf5_storage::absent;
    std::string library_reason;           ///< library: follows "it is read by libhdf5: "
    std::uint64_t offset_bytes = 0;       ///< contiguous: absolute, including a user block
    std::vector<std::byte> compact_data;  ///< compact: every element, in C order
    std::vector<std::byte> fill;          ///< one element; empty means zeros
    shape_vector chunk_shape;             ///< chunked; also library, if there are chunks
    std::vector<hdf5_filter> filters;     ///< if there are chunks, in the order in which writing applied them
    std::vector<hdf5_chunk> chunks;       ///< chunked: one for each box of the chunk grid, in C order

    friend bool operator==(const hdf5_description&, const hdf5_description&) = default;
};

/// The maximum number of chunks that a description lists; libhdf5 reads a dataset with more chunks.
inline constexpr std::uint64_t max_hdf5_chunks = std::uint64_t{1} << 24;

/// Above this number of chunks, libhdf5 first counts the written chunks, which is slow. If only few were
/// written, libhdf5 reads the dataset.
inline constexpr std::uint64_t many_hdf5_chunks = std::uint64_t{1} << 20;

/// The size of libhdf5's chunk cache for a dataset that only libhdf5 can read.
inline constexpr std::uint64_t hdf5_library_cache_bytes = std::uint64_t{64} << 20;

/// Bytes of all elements.
/// @throws format_error if they are 2^63 or more.
std::uint64_t payload_bytes(const hdf5_description& description);

/// The memory that a description takes.
std::size_t memory_bytes(const hdf5_description& description) noexcept;

/// The number of chunks in the grid; empty if there are 2^64 or more. The shapes must have the same rank, and
/// no length of a chunk may be 0.
std::optional<std::uint64_t> hdf5_grid_size(const shape_vector& shape,
                                            const shape_vector& chunk_shape) noexcept;

/// The names of the filters in the order in which they were applied, made printable: "shuffle, deflate".
std::string hdf5_filter_names(const hdf5_description& description);

/// One sentence that says why the bytes can or cannot be mapped as they are: "it is stored in chunks of shape
/// (64, 64), filtered by shuffle, deflate".
std::string hdf5_storage_reason(const hdf5_description& description);

/// The listing of a dataset for `inspect`. The description need not list the chunks.
array_listing hdf5_listing(const hdf5_description& description);

// ---- checked, written and read ---------------------------------------------------------------------------

/// Checks every count and offset against `file_size_bytes` and against each other, since a damaged file may
/// hold any values. Afterwards all reads are within the file. hdf5_pipeline checks the filters and the stored
/// size of each chunk.
/// @throws format_error, a sentence without the path that begins "the dataset 'NAME'".
void check_hdf5_description(const hdf5_description& description, std::uint64_t file_size_bytes);

/// Serialises a description for parse_hdf5_description.
std::vector<std::byte> serialize(const hdf5_description& description);

/// Parses a serialised description: a pure function of bytes that are not trusted. It allocates at most a few
/// times the size of the bytes, and checks the description as above.
/// @throws format_error, a sentence without the path.
hdf5_description parse_hdf5_description(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

/// The same for the listings that `inspect` shows; nothing in them is checked against a file.
std::vector<std::byte> serialize(std::span<const array_listing> listings);
std::vector<array_listing> parse_array_listings(std::span<const std::byte> bytes);

}  // namespace pinflow::detail
