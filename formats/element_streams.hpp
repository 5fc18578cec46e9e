#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include "pinflow/formats/listing.hpp"
#include "src/core/element_stream.hpp"

namespace pinflow::detail {

/// A file whose arrays are read as element streams. The directory of a .npz file, or the header of a
/// safetensors file, is read once, when the file is opened. Streams may outlive the object. Thread-safe; each
/// stream is for one thread.
class element_file {
 public:
    element_file() = default;
    element_file(const element_file&) = delete;
    element_file& operator=(const element_file&) = delete;
    virtual ~element_file() = default;

    /// Opens a stream of the elements of one array. HDF5 chunks and deflated .npz members are decoded piece
    /// by piece. Exception: a deflated member in Fortran order is decoded as a whole, because inflating
    /// yields the elements in stored order only.
    /// @param name as list_arrays gives it, or a field of a .npy file's array.
    /// @param memory_bytes memory for reordering. For a chunked HDF5 dataset, half is for rows read ahead and
    /// half for decoding chunks. Small values are raised: to 64 KiB for the rows of HDF5 datasets that are
    /// not contiguous, to 576 KiB for all other arrays. One chunk always fits, and so does one row that
    /// libhdf5 reads. A deflated .npz member in Fortran order is not counted.
    /// @throws as pinflow::open.
    virtual std::unique_ptr<element_stream> stream(std::string_view name,
                                                   std::uint64_t memory_bytes) const = 0;

    /// As `stream`, for a small part of an array, if others may follow: decoded HDF5 chunks of up to 2 MiB
    /// are kept for them, 16 MiB of chunks and about 32 MiB of memory for decoding. Also kept is the last
    /// dataset that only libhdf5 can read, or whose description takes more than 8 MiB, up to 64.
    virtual std::unique_ptr<element_stream> stream_of_part(std::string_view name,
                                                           std::uint64_t memory_bytes) const {
        return stream(name, memory_bytes);
    }

    /// Names small arrays whose streams will follow, in about this order: `stream` then reads the metadata of
    /// several of them in one pass.
    virtual void expect(std::span<const std::string_view> /*names*/) const {}
};

/// Opens a file of any supported format.
/// @throws as pinflow::open.
std::unique_ptr<element_file> open_elements(const std::filesystem::path& path);

/// Describes the one array of a file.
/// @throws as list_arrays, and invalid_argument if there is none, or more than one.
array_listing only_array(const std::filesystem::path& path);

/// Opens a .npz file. `finish` of a stream checks the member's CRC-32, also for a stored member. Exception:
/// the CRC-32 of a deflated member in Fortran order is checked when its stream is opened.
std::unique_ptr<element_file> open_npz_elements(const std::filesystem::path& path);

/// Opens a safetensors file.
std::unique_ptr<element_file> open_safetensors_elements(const std::filesystem::path& path);

/// Opens an HDF5 file, without reading it. `stream` describes a dataset, and keeps the description for later
/// streams, in up to 8 MiB, unless only libhdf5 can read it. It throws data_changed if the file has changed
/// since the first stream.
/// @throws format_not_built if this build lacks HDF5.
std::unique_ptr<element_file> open_hdf5_elements(const std::filesystem::path& path);

}  // namespace pinflow::detail
