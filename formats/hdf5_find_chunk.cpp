#include <fmt/format.h>

#include <limits>
#include <vector>

#include "formats/hdf5_handles.hpp"

/// Finds the locations of chunks.
namespace pinflow::detail::hdf5 {

namespace {

std::string spelled(std::span<const ::hsize_t> position) {
    return to_string(shape_vector(position.begin(), position.end()));
}

}  // namespace

void* untouched_memory::of(std::uint64_t size_bytes) {
    if (memory_.size_bytes() < size_bytes) {
        memory_ = {};
        memory_ = memory_region::anonymous(size_bytes);
    }
    return memory_.data();
}

chunk_finder::chunk_finder(const open_file& file, const object_handle& dataset,
                           const hdf5_description& description)
    : file_(file), dataset_(dataset), description_(description) {
    const property_handle creation(::H5Dget_create_plist(dataset.id()), "cannot be examined");
    unsigned options = 0;
    checked(::H5Pget_chunk_opts(creation.id(), &options), "cannot be examined");
    edges_unfiltered_ = (options & H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS) != 0;
}

hdf5_chunk chunk_finder::find(std::span<const ::hsize_t> position) {
    ::hsize_t size_bytes = 0;
    if (::H5Dget_chunk_storage_size(dataset_.id(), position.data(), &size_bytes) < 0) {
        if (!is_missing(position)) {
            fail(fmt::format("has a chunk at {} that cannot be found", spelled(position)));
        }
        return {};
    }
    if (size_bytes == 0) {
        // libhdf5 would return uninitialised memory for a chunk with an offset but no size
        if (!is_unallocated(position)) {
            throw format_error(fmt::format("has a chunk of no bytes at {}", spelled(position)));
        }
        return {};
    }
    if (size_bytes > file_.size_bytes()) {
        throw format_error(fmt::format("has a chunk of {} bytes at {}, but the file has {}", size_bytes,
                                       spelled(position), file_.size_bytes()));
    }
    std::uint32_t filter_mask = 0;
    void* const untouched = memory_.of(size_bytes);
    recording records;
#if H5_VERSION_GE(2, 0, 0)
    std::size_t room_bytes = size_bytes;
    const ::herr_t status =
        ::H5Dread_chunk2(dataset_.id(), H5P_DEFAULT, position.data(), &filter_mask, untouched, &room_bytes);
#else
    const ::herr_t status =
        ::H5Dread_chunk(dataset_.id(), H5P_DEFAULT, position.data(), &filter_mask, untouched);
#endif
    const recorded_read read = records.take();
    if (status < 0) fail(fmt::format("has a chunk at {} that cannot be found", spelled(position)));
    if (read.count != 1 || read.size_bytes != size_bytes) {
        throw format_error(fmt::format("has a chunk at {} of {} bytes, of which libhdf5 would read {}",
                                       spelled(position), size_bytes, read.size_bytes));
    }
    const std::uint64_t filter_bits = (std::uint64_t{1} << description_.filters.size()) - 1;
    if (edges_unfiltered_ && is_partial(position)) filter_mask = std::numeric_limits<std::uint32_t>::max();
    return {read.offset_bytes, read.size_bytes, static_cast<std::uint32_t>(filter_mask & filter_bits)};
}

bool chunk_finder::is_missing(std::span<const ::hsize_t> position) const {
    const failure_report report = report_failure();
    if (report.function == "H5D__get_chunk_storage_size" &&
        report.description == "chunk storage is not allocated") {
        return true;
    }
    // in case a version of libhdf5 words it differently: slower, but reliable
    return is_unallocated(position);
}

bool chunk_finder::is_unallocated(std::span<const ::hsize_t> position) const {
    unsigned mask = 0;
    ::haddr_t offset = 0;
    ::hsize_t size_bytes = 0;
    return ::H5Dget_chunk_info_by_coord(dataset_.id(), position.data(), &mask, &offset, &size_bytes) >= 0 &&
           offset == HADDR_UNDEF && size_bytes == 0;
}

bool chunk_finder::is_partial(std::span<const ::hsize_t> position) const noexcept {
    for (std::size_t axis = 0; axis < position.size(); ++axis) {
        if (description_.shape[axis] - position[axis] < description_.chunk_shape[axis]) return true;
    }
    return false;
}

}  // namespace pinflow::detail::hdf5
