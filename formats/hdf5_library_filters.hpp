#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "formats/hdf5_description.hpp"
#include "formats/hdf5_filters.hpp"

namespace pinflow::detail {

/// Checks a chunk before libhdf5's filters decode it. If damaged bytes or parameters declare other sizes than
/// the chunk has, those filters may read past the end of the stored bytes, or leave parts of the output
/// unwritten. For one thread at a time.
class hdf5_library_filters {
 public:
    /// `chunk_bytes` is the size of a decoded chunk.
    hdf5_library_filters(std::span<const hdf5_filter> filters, std::uint64_t chunk_bytes);
    hdf5_library_filters(const hdf5_library_filters&) = delete;
    hdf5_library_filters& operator=(const hdf5_library_filters&) = delete;
    ~hdf5_library_filters();

    /// Checks `stored`, the bytes of one chunk in the file.
    /// @return true if libhdf5 will write every byte of the decoded chunk and read no byte beyond `stored`.
    /// False if that cannot be known:
    /// - for szip, and for filters that only an application knows
    /// - for an n-bit filter with 256 or more parameters
    /// - if lzf was applied after a filter that pinflow cannot decode
    /// - if a filter other than shuffle was applied before the last filter that pinflow cannot decode
    /// @throws format_error if the bytes or the filter parameters are found to be damaged. The message
    /// continues after the chunk's name, as in hdf5_chunk_decoder.
    bool check(std::uint32_t filter_mask, std::span<const std::byte> stored);

 private:
    struct decompressor;
    void check_without_library(std::span<const hdf5_filter* const> applied,
                               std::span<const std::byte> stored);
    std::span<const std::byte> undo(const hdf5_filter& filter, std::span<const std::byte> input,
                                    std::vector<std::byte>& output);

    std::vector<hdf5_filter> filters_;
    std::uint64_t chunk_bytes_;
    std::unique_ptr<decompressor> decompressor_;  // from the first deflated chunk on
    hdf5_chunk_decoder decoder_;
    std::vector<std::byte> chunk_;
    std::array<std::vector<std::byte>, 2> between_;  // the outputs of filters, by turns
};

}  // namespace pinflow::detail
