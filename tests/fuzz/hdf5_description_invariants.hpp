#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "formats/hdf5_description.hpp"
#include "pinflow/error.hpp"

/// What must hold for the descriptions of HDF5 datasets that are read from any bytes: shared by the fuzz
/// target and the test that replays its findings.
namespace hdf5_description_invariants {

namespace detail = pinflow::detail;

inline bool lies_within(std::uint64_t offset_bytes, std::uint64_t size_bytes, std::uint64_t file_size_bytes) {
    return offset_bytes <= file_size_bytes && size_bytes <= file_size_bytes - offset_bytes;
}

/// @return an empty string, or what does not hold.
inline std::string broken_for(const detail::hdf5_description& description, std::uint64_t file_size_bytes) {
    const std::uint64_t size_bytes = detail::payload_bytes(description);
    if (size_bytes != pinflow::element_count(description.shape) * description.dtype.size_bytes()) {
        return "the payload is not that of the elements";
    }
    if (!description.fill.empty() && description.fill.size() != description.dtype.size_bytes()) {
        return "the fill value is not an element";
    }
    switch (description.storage) {
        case detail::hdf5_storage::contiguous:
            if (!lies_within(description.offset_bytes, size_bytes, file_size_bytes))
                return "the data leaves the file";
            break;
        case detail::hdf5_storage::chunked: {
            if (description.chunk_shape.size() != description.shape.size()) return "chunks have another rank";
            const auto count = detail::hdf5_grid_size(description.shape, description.chunk_shape);
            if (!count || *count != description.chunks.size() || *count == 0)
                return "the grid has other chunks";
            for (const detail::hdf5_chunk& chunk : description.chunks) {
                if (!lies_within(chunk.offset_bytes, chunk.size_bytes, file_size_bytes))
                    return "a chunk leaves the file";
            }
            break;
        }
        case detail::hdf5_storage::compact:
            if (description.compact_data.size() != size_bytes) return "the data is not the elements";
            break;
        case detail::hdf5_storage::absent:
        case detail::hdf5_storage::library:
            break;
    }
    if (detail::hdf5_storage_reason(description).find('\n') != std::string::npos)
        return "the reason has several lines";
    if (detail::hdf5_listing(description).size_bytes != size_bytes) return "the listing has another size";
    const auto again = detail::parse_hdf5_description(detail::serialize(description), file_size_bytes);
    return again == description ? "" : "what is written for it reads differently";
}

/// Runs `check`. An exception other than format_error, and an error message of several lines, break an
/// invariant too.
template <typename Check>
std::string broken_in(Check check) {
    try {
        return check();
    } catch (const pinflow::format_error& failure) {
        return std::string(failure.what()).find('\n') == std::string::npos ? ""
                                                                           : "the sentence has several lines";
    } catch (const std::exception& failure) {
        return std::string("an exception of another type: ") + failure.what();
    }
}

/// Parses these bytes as a description in a small and a large file, and as listings.
/// @return the invariant that does not hold; an empty string if all hold.
inline std::string broken_for(std::span<const std::byte> bytes) {
    for (const std::uint64_t file_size_bytes :
         {std::uint64_t{4096}, std::numeric_limits<std::uint64_t>::max()}) {
        const std::string broken = broken_in([&] {
            return broken_for(detail::parse_hdf5_description(bytes, file_size_bytes), file_size_bytes);
        });
        if (!broken.empty()) return broken;
    }
    return broken_in([&]() -> std::string {
        const auto written = detail::serialize(detail::parse_array_listings(bytes));
        const auto again = detail::serialize(detail::parse_array_listings(written));
        return again == written ? "" : "what is written for a listing reads differently";
    });
}

}  // namespace hdf5_description_invariants
