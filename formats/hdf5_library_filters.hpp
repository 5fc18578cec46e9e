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

/// What libhdf5's filters take for granted, checked before it undoes them: they read past the end of what is
/// stored for a chunk, and leave parts of what they make unwritten, where damaged bytes or parameters say
/// other sizes than the chunk has. For one thread at a time.
class hdf5_library_filters {
 public:
    /// For chunks of `chunk_bytes`, undone of all filters.
    hdf5_library_filters(std::span<const hdf5_filter> filters, std::uint64_t chunk_bytes);
    hdf5_library_filters(const hdf5_library_filters&) = delete;
    hdf5_library_filters& operator=(const hdf5_library_filters&) = delete;
    ~hdf5_library_filters();

    /// `stored` is a chunk as it lies in the file.
    /// @return whether libhdf5 will write every byte of the chunk, and read none beyond `stored`. That is not
    /// to be known of szip, of filters that only an application knows, and of compression that came before
    /// a filter of libhdf5's.
    /// @throws format_error when it will not; to be read after the chunk's name, as what hdf5_chunk_decoder
    /// throws.
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
    std::array<std::vector<std::byte>, 2> between_;  // two filters, by turns
};

}  // namespace pinflow::detail
