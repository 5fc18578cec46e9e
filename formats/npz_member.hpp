#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "formats/zip_directory.hpp"
#include "formats/zip_member.hpp"
#include "pinflow/formats/npy.hpp"

namespace pinflow::detail {

/// A member of a .npz file, as its .npy header describes it.
struct npz_member {
    npy_header header;
    std::uint64_t payload_bytes = 0;
    /// The offset of the member's data in the file. The data begins with the .npy header.
    std::uint64_t data_offset_bytes = 0;
    std::unique_ptr<zip_member_reader> reader;  ///< at the first element
};

/// Reads the header of a member. `piece_bytes` is as in zip_member_reader.
/// @throws format_error and unsupported (a sentence without the path) for a member that is no array, whose
/// size contradicts its header, or that cannot be read; what `read` throws.
npz_member begin_npz_member(const zip_entry& entry, const read_bytes& read, std::size_t piece_bytes);

}  // namespace pinflow::detail
