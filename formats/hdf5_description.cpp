#include "formats/hdf5_description.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/mapping_reason.hpp"
#include "src/core/quote.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t max_bytes = std::numeric_limits<std::int64_t>::max();
/// numpy's limit. HDF5 allows 32, plus the axes of an array type.
constexpr std::size_t max_axes = 64;
/// Bits of a filter mask.
constexpr std::size_t max_filters = 32;
/// HDF5 stores the size of a decoded chunk in 32 bits.
constexpr std::uint64_t max_chunk_bytes = std::numeric_limits<std::uint32_t>::max();

/// Throws format_error; the message begins with the dataset's name.
template <typename... Arguments>
[[noreturn]] void fail(const hdf5_description& description, fmt::format_string<Arguments...> sentence,
                       Arguments&&... arguments) {
    throw format_error(fmt::format("the dataset {} {}", quote(description.name),
                                   fmt::format(sentence, std::forward<Arguments>(arguments)...)));
}

/// The bytes of a block of that shape; empty if they are 2^63 or more. As in numpy, a length of 0 counts as
/// 1, so that the result does not depend on the order of the axes.
std::optional<std::uint64_t> extended_bytes(const shape_vector& shape, std::uint64_t element_bytes) noexcept {
    std::uint64_t bytes = element_bytes;
    for (const std::uint64_t length : shape) {
        if (length != 0 && (!multiply(bytes, length, bytes) || bytes > max_bytes)) return std::nullopt;
    }
    return bytes;
}

bool is_empty(const shape_vector& shape) noexcept {
    return std::ranges::find(shape, 0u) != shape.end();
}

// ---- the check -------------------------------------------------------------------------------------------

void check_chunk(const hdf5_description& description, const hdf5_chunk& chunk, std::uint64_t chunk_bytes,
                 std::uint64_t file_size_bytes) {
    if (chunk.size_bytes == 0) {
        if (chunk != hdf5_chunk{}) {
            fail(description, "has a chunk of no bytes at offset {}", chunk.offset_bytes);
        }
        return;
    }
    if (chunk.offset_bytes > file_size_bytes || chunk.size_bytes > file_size_bytes - chunk.offset_bytes) {
        fail(description, "has a chunk of {} bytes at offset {}, but the file has {} bytes", chunk.size_bytes,
             chunk.offset_bytes, file_size_bytes);
    }
    if (description.filters.empty() && chunk.size_bytes != chunk_bytes) {
        fail(description, "has a chunk of {} bytes at offset {}, which takes {} without filters",
             chunk.size_bytes, chunk.offset_bytes, chunk_bytes);
    }
}

void check_chunk_shape(const hdf5_description& description) {
    const shape_vector& shape = description.shape;
    const shape_vector& chunk_shape = description.chunk_shape;
    if (shape.empty() || chunk_shape.size() != shape.size() || is_empty(chunk_shape)) {
        fail(description, "of shape {} cannot be stored in chunks of shape {}", to_string(shape),
             to_string(chunk_shape));
    }
    const auto bytes = extended_bytes(chunk_shape, description.dtype.size_bytes());
    if (!bytes || *bytes > max_chunk_bytes) {
        fail(description, "has chunks of shape {}, which HDF5 does not allow to be larger than {} bytes",
             to_string(chunk_shape), max_chunk_bytes);
    }
}

void check_chunks(const hdf5_description& description, std::uint64_t file_size_bytes) {
    const auto count = hdf5_grid_size(description.shape, description.chunk_shape);
    if (is_empty(description.shape) || !count || *count != description.chunks.size() ||
        *count > max_hdf5_chunks) {
        fail(description, "of shape {} cannot have {} chunks of shape {}", to_string(description.shape),
             description.chunks.size(), to_string(description.chunk_shape));
    }
    const std::uint64_t chunk_bytes =
        *extended_bytes(description.chunk_shape, description.dtype.size_bytes());
    for (const hdf5_chunk& chunk : description.chunks) {
        check_chunk(description, chunk, chunk_bytes, file_size_bytes);
    }
}

/// Checks that members of other kinds of storage are empty.
void check_nothing_else(const hdf5_description& description) {
    using enum hdf5_storage;
    const hdf5_storage storage = description.storage;
    const bool has_chunks = !description.chunk_shape.empty() || !description.filters.empty();
    if ((has_chunks && storage != chunked && storage != library) ||
        (!description.chunks.empty() && storage != chunked) ||
        (!description.compact_data.empty() && storage != compact) ||
        (description.offset_bytes != 0 && storage != contiguous) ||
        description.library_reason.empty() != (storage != library)) {
        fail(description, "is described in a way that contradicts itself");
    }
}

}  // namespace

std::uint64_t payload_bytes(const hdf5_description& description) {
    const auto bytes = extended_bytes(description.shape, description.dtype.size_bytes());
    if (!bytes) {
        fail(description, "of {} and shape {} is too large", description.dtype.descr(),
             to_string(description.shape));
    }
    return is_empty(description.shape) ? 0 : *bytes;
}

std::size_t memory_bytes(const hdf5_description& description) noexcept {
    return sizeof(hdf5_description) + description.compact_data.size() +
           description.chunks.size() * sizeof(hdf5_chunk);
}

std::optional<std::uint64_t> hdf5_grid_size(const shape_vector& shape,
                                            const shape_vector& chunk_shape) noexcept {
    std::uint64_t count = 1;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        const std::uint64_t whole = shape[axis] / chunk_shape[axis];
        const std::uint64_t along = whole + (shape[axis] % chunk_shape[axis] == 0 ? 0 : 1);
        if (!multiply(count, along, count)) return std::nullopt;
    }
    return count;
}

void check_hdf5_description(const hdf5_description& description, std::uint64_t file_size_bytes) {
    using enum hdf5_storage;
    if (description.dtype.size_bytes() == 0) fail(description, "has elements of no bytes");
    if (description.shape.size() > max_axes) {
        fail(description, "has {} axes: numpy allows {}", description.shape.size(), max_axes);
    }
    if (description.filters.size() > max_filters) {
        fail(description, "has {} filters: HDF5 allows {}", description.filters.size(), max_filters);
    }
    const std::uint64_t size_bytes = payload_bytes(description);
    if (!description.fill.empty() && description.fill.size() != description.dtype.size_bytes()) {
        fail(description, "has a fill value of {} bytes for elements of {}", description.fill.size(),
             description.dtype.size_bytes());
    }
    check_nothing_else(description);
    if (!description.chunk_shape.empty() || description.storage == chunked) check_chunk_shape(description);
    switch (description.storage) {
        case contiguous:
            if (description.offset_bytes > file_size_bytes ||
                size_bytes > file_size_bytes - description.offset_bytes) {
                fail(description, "has {} bytes at offset {}, but the file has {} bytes", size_bytes,
                     description.offset_bytes, file_size_bytes);
            }
            break;
        case chunked:
            check_chunks(description, file_size_bytes);
            break;
        case compact:
            if (description.compact_data.size() != size_bytes) {
                fail(description, "of shape {} has {} bytes, not {}", to_string(description.shape),
                     description.compact_data.size(), size_bytes);
            }
            break;
        case absent:
        case library:
            break;
    }
}

// ---- for people ------------------------------------------------------------------------------------------

std::string hdf5_filter_names(const hdf5_description& description) {
    std::string names;
    for (const hdf5_filter& filter : description.filters) {
        const std::string quoted = quote(filter.name.empty() ? std::to_string(filter.id) : filter.name);
        names += (names.empty() ? "" : ", ") + quoted.substr(1, quoted.size() - 2);
    }
    return names;
}

std::string hdf5_storage_reason(const hdf5_description& description) {
    switch (description.storage) {
        case hdf5_storage::contiguous:
            return mapping_reason(description.dtype, description.offset_bytes, payload_bytes(description));
        case hdf5_storage::chunked:
            return fmt::format("it is stored in chunks of shape {}{}{}", to_string(description.chunk_shape),
                               description.filters.empty() ? "" : ", filtered by ",
                               hdf5_filter_names(description));
        case hdf5_storage::compact:
            return "it is stored in the file's metadata (compact)";
        case hdf5_storage::absent:
            return payload_bytes(description) == 0 ? "there are no bytes to map"
                                                   : "it was never written: all elements are the fill value";
        case hdf5_storage::library:
            return "it is read by libhdf5: " + description.library_reason;
    }
    return {};
}

namespace {

/// Says whether rows are mapped, for unfiltered chunks that hold whole little-endian rows. Empty for others.
/// Rows are mapped only if every chunk was written. A listing of the whole file does not know that; opening
/// one dataset does.
std::string how_chunks_are_mapped(const hdf5_description& description) {
    const bool hold_rows = description.storage == hdf5_storage::chunked && description.filters.empty() &&
                           description.dtype.is_little_endian() &&
                           std::equal(description.shape.begin() + 1, description.shape.end(),
                                      description.chunk_shape.begin() + 1);
    if (!hold_rows) return {};
    if (description.chunks.empty())
        return "; open copies it into memory, open_rows maps its rows chunk by chunk if all chunks were "
               "written";
    const auto missing = std::ranges::count(description.chunks, 0u, &hdf5_chunk::size_bytes);
    if (missing == 0) return "; open copies it into memory, open_rows maps its rows chunk by chunk";
    return fmt::format(", of which {} of {} were never written, so its rows are not mapped", missing,
                       description.chunks.size());
}

}  // namespace

array_listing hdf5_listing(const hdf5_description& description) {
    array_listing listing;
    listing.name = description.name;
    listing.dtype = description.dtype;
    listing.shape = description.shape;
    listing.size_bytes = payload_bytes(description);
    listing.mappable = description.storage == hdf5_storage::contiguous || listing.size_bytes == 0;
    if (description.storage == hdf5_storage::contiguous) listing.offset_bytes = description.offset_bytes;
    listing.reason = hdf5_storage_reason(description) + how_chunks_are_mapped(description);
    if (description.storage != hdf5_storage::chunked) return listing;
    if (hdf5_grid_size(description.shape, description.chunk_shape) <= many_hdf5_chunks) {
        listing.chunk_shape = description.chunk_shape;
    } else if (description.chunks.empty()) {
        listing.reason += "; if few of its chunks were ever written, it is read by libhdf5";
    }
    return listing;
}

}  // namespace pinflow::detail
