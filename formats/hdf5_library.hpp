#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/hdf5_description.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/listing.hpp"

/// The one layer that calls libhdf5. One thread at a time is in it, whether the library is built for threads
/// or not (a process that also calls it elsewhere needs one that is). Files are opened read-only, filter
/// plugins are never loaded, other files never opened; the library prints nothing, and what it has to say
/// ends up in a sentence. Plugins and error reports are as they were for others afterwards.
///
/// The library parses the file's metadata, and is known to crash on damaged files: see
/// pinflow/formats/hdf5.hpp.
namespace pinflow::detail {

/// "1.10.8", of the library that is loaded.
std::string hdf5_library_version();

/// The datasets of a file, in groups and subgroups, by their paths; each object once, under the first of its
/// hard links. What cannot be opened is listed with the reason: other types, links that lead to other files
/// or nowhere.
/// @throws system_failure, format_error, data_changed, unsupported (too much to list); sentences name the
/// path.
std::vector<array_listing> list_hdf5_datasets(const input_file& file);

/// The dataset that the path `name` leads to ("group/data", with or without a slash in front), by soft links
/// too. Nothing of it is read, except when it lies among the metadata. The description has passed its check,
/// and no handle of the library stays open.
/// @throws invalid_argument when there is no such dataset, unsupported for types that pinflow has no elements
/// for and for storage outside the file, others as above; sentences name the path and the dataset.
hdf5_description describe_hdf5_dataset(const input_file& file, std::string_view name);

/// What to do about chunks for which no check can tell whether libhdf5 will fill them. A damaged szip chunk,
/// for example, leaves part of libhdf5's buffer uninitialised.
enum class hdf5_unverified_chunks : bool {
    accepted,
    /// Decodes such a chunk twice beforehand, with different bytes in free memory, and refuses it if the
    /// results differ. This changes the behaviour of the whole process's allocator meanwhile.
    decoded_twice,
};

/// A dataset that stays open, for storage that only the library can read. Each chunk is checked before the
/// library decodes it for the first time. Any thread may use it; one at a time does.
class hdf5_library_reader {
 public:
    /// Opens the dataset again. @throws as describe_hdf5_dataset; data_changed when it is not as described.
    hdf5_library_reader(std::shared_ptr<const input_file> file, const hdf5_description& description,
                        hdf5_unverified_chunks unverified = hdf5_unverified_chunks::accepted);
    hdf5_library_reader(const hdf5_library_reader&) = delete;
    hdf5_library_reader& operator=(const hdf5_library_reader&) = delete;
    ~hdf5_library_reader();

    /// Fills `destination` with consecutive rows (indices of the first axis; without axes the element is the
    /// one row), as they are stored, byte order included. Rows of one chunk are best read together: few
    /// chunks are kept decoded.
    /// @throws invalid_argument for rows past the end or a destination of another size, format_error for
    /// damaged chunks, and when the library cannot read them; the sentence names path and dataset.
    void read(std::uint64_t first_row, std::uint64_t row_count, std::span<std::byte> destination) const;

 private:
    struct state;
    std::unique_ptr<state> state_;
};

}  // namespace pinflow::detail
