#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/hdf5_aliases.hpp"
#include "formats/hdf5_description.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/listing.hpp"

/// The reading part of the only layer that calls libhdf5; hdf5_output.hpp is the writing part. The layer
/// admits one thread at a time, even if the library is thread-safe. (A process that also calls libhdf5
/// elsewhere needs a thread-safe build.) Here, files are opened read-only; filter plugins are never loaded,
/// and other files are never opened. The library prints nothing: its reports become part of error messages.
/// After each call, the settings for plugins and error reports are restored.
///
/// The library parses the file's metadata, and is known to crash on damaged files: see
/// pinflow/formats/hdf5.hpp.
namespace pinflow::detail {

/// Lists the datasets of a file, in groups and subgroups, by their paths; each object once, under the first
/// of its hard links. Datasets of unsupported types, and links that lead to other files or nowhere, are
/// listed with the reason.
/// @throws system_failure, format_error, data_changed, unsupported (too many links); messages name the path.
std::vector<array_listing> list_hdf5_datasets(const input_file& file);

/// As the function for a path.
std::vector<hdf5_alias> list_hdf5_aliases(const input_file& file);

/// Describes the dataset at the path `name` ("group/data", with or without a leading slash), following soft
/// links. Reads no elements, except of a compact dataset, which is part of the metadata. The returned
/// description has passed check_hdf5_description, and no handle of the library stays open.
/// @throws invalid_argument if there is no such dataset.
/// @throws unsupported for types that pinflow lacks and for storage outside the file; other errors as above.
/// Messages name the path.
hdf5_description describe_hdf5_dataset(const input_file& file, std::string_view name);
/// Lists a dataset, without the locations of its chunks.
/// @throws as describe_hdf5_dataset, but damage of chunks goes unnoticed.
array_listing list_hdf5_dataset(const input_file& file, std::string_view name);
/// The same, but empty if other paths lead to one of its groups, or a soft link does.
std::optional<array_listing> find_hdf5_dataset(const input_file& file, std::string_view name);

/// Describes several datasets, and opens the file only once, which takes longer than describing a small one.
/// Leaves out those that cannot be described, and the rest when the descriptions take `max_bytes` of memory,
/// but never the first one.
/// @throws as describe_hdf5_dataset if the file cannot be opened.
std::vector<hdf5_description> describe_hdf5_datasets(const input_file& file,
                                                     std::span<const std::string_view> names,
                                                     std::size_t max_bytes);

/// How to treat chunks for which no check can tell whether libhdf5 will fill them. A damaged szip chunk, for
/// example, may leave part of libhdf5's buffer uninitialised.
enum class hdf5_unverified_chunks : bool {
    accepted,
    /// Decodes such a chunk twice beforehand, with different bytes in free memory, and refuses it if the
    /// results differ. This changes the behaviour of the whole process's allocator meanwhile.
    decoded_twice,
};

/// Keeps a dataset open whose storage only the library can read. Checks each chunk before the library decodes
/// it for the first time; after 2^20 chunks, all are checked again. Thread-safe; calls are serialised.
class hdf5_library_reader {
 public:
    /// Opens the dataset again.
    /// @throws as describe_hdf5_dataset; data_changed if it no longer matches the description.
    hdf5_library_reader(std::shared_ptr<const input_file> file, const hdf5_description& description,
                        hdf5_unverified_chunks unverified = hdf5_unverified_chunks::accepted);
    hdf5_library_reader(const hdf5_library_reader&) = delete;
    hdf5_library_reader& operator=(const hdf5_library_reader&) = delete;
    ~hdf5_library_reader();

    /// Fills `destination` with consecutive rows, in the stored byte order. Rows are indices of the first
    /// axis; a dataset without axes is one row. Read the rows of one chunk together: only few decoded chunks
    /// are cached.
    /// @throws invalid_argument for rows out of range or a destination of another size.
    /// @throws format_error for damaged chunks, or if the library cannot read them; the message names path
    /// and dataset.
    /// @throws system_failure, data_changed if a chunk cannot be read from the file; std::bad_alloc.
    void read(std::uint64_t first_row, std::uint64_t row_count, std::span<std::byte> destination) const;
    /// Whether read_box works: the dataset has axes, and its elements are no arrays.
    bool reads_boxes() const noexcept;
    /// Fills `destination` with a box, `lengths` elements along each axis from `first` on, in C order.
    /// @throws as `read`.
    void read_box(std::span<const std::uint64_t> first, std::span<const std::uint64_t> lengths,
                  std::span<std::byte> destination) const;

 private:
    struct state;
    template <typename Work>
    void locked(Work work) const;

    std::unique_ptr<state> state_;
};

}  // namespace pinflow::detail
