#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/formats/listing.hpp"
#include "pinflow/row_source.hpp"

/// HDF5 files. libhdf5 reads the metadata of a file in the calling process, and damaged files can crash
/// libhdf5 or make it loop for ever (1.10.8: 24 of 20,000 single byte flips crash). So open only files from a
/// trusted source with these functions; the tool runs libhdf5 in a child process. The data is read by
/// pinflow's own code, which trusts nothing: contiguous data is mapped, and chunks filtered by shuffle,
/// deflate, fletcher32 and lzf are decoded on all cores. libhdf5 reads compact datasets, which are part of
/// the metadata, and data that this code cannot read (such as chunks with other filters, or datasets with
/// more than 2^24 chunks), on one thread at a time. Filter plugins are never loaded, and other files are
/// never opened.
///
/// libhdf5's filters trust the sizes in a chunk; if the chunk is damaged, they return uninitialised memory as
/// elements. So pinflow checks each chunk before libhdf5 decodes it. A scale-offset or n-bit chunk is refused
/// if it is too short or if its filter parameters are for chunks of another size, an szip chunk if it
/// declares another size.
///
/// In four kinds of chunks, damage cannot be detected before decoding: szip chunks of the right size (szip
/// may leave their ends uninitialised), chunks of filters that the application has registered with libhdf5,
/// chunks to which a filter other than shuffle was applied before a filter that only libhdf5 has, and n-bit
/// chunks with 256 or more filter parameters. The tool decodes such chunks twice, with different bytes in
/// free memory, and refuses them if the results differ. The library cannot do this, since the process may
/// have other threads: here, the unwritten part of such a chunk has undefined contents. (Damage that gives
/// wrong elements of the right size is detected only by a checksum, such as fletcher32.)
///
/// Fixed-size strings are returned as stored: padding spaces are kept, unlike in h5py.
///
/// All functions may be called from any thread at the same time; calls of libhdf5 are serialised. If the
/// process also calls libhdf5 elsewhere at the same time, it needs a thread-safe build of libhdf5.
namespace pinflow {

/// Whether this build can read and write HDF5 files.
bool has_hdf5() noexcept;

/// Lists the datasets of a file, in groups and subgroups, by their paths ("group/data"). Each object is
/// listed once. Objects that cannot be opened, and links that lead to other files or nowhere, are listed with
/// the reason.
/// @throws system_failure, format_error, data_changed, unsupported (more than 2^20 links).
/// @throws format_not_built, as all functions below, in a build without HDF5. Messages name the path.
std::vector<array_listing> list_hdf5(const std::filesystem::path& path);

/// The same for the dataset `name`, a path within the file that may contain soft links.
/// @throws invalid_argument if there is no such dataset.
/// @throws unsupported if its elements have no fixed size (variable-length types, references), or if its data
/// is in other files (external, virtual); as list_hdf5.
array_listing list_hdf5(const std::filesystem::path& path, std::string_view name);

/// Opens the dataset `name`. A contiguous dataset is mapped in place; any other is decoded as a whole into
/// the process's own memory.
/// @throws as list_hdf5; system_failure if there is too little memory.
array open_hdf5(const std::filesystem::path& path, std::string_view name);

struct hdf5_options {
    /// Upper bound on the memory for chunks, in bytes: half for a cache of decoded chunks, half for decoding.
    /// If four chunks need more, the bound is four chunks. Not included: 25 bytes per chunk for its location,
    /// and 64 MiB for a dataset that only libhdf5 can read.
    std::uint64_t memory_bytes = std::uint64_t{512} << 20;
};

/// Opens the rows of the dataset `name`, without decoding all of it. One `read_rows` decodes each chunk that
/// its rows need once, in parallel on all cores. The most recently used chunks are cached. A contiguous
/// little-endian dataset has one extent. Chunks without filters that hold whole little-endian rows are
/// extents too, if all chunks were written.
/// @throws as list_hdf5; unsupported for a dataset without axes.
std::shared_ptr<const row_source> open_hdf5_rows(const std::filesystem::path& path, std::string_view name,
                                                 const hdf5_options& options = {});

/// Writes an HDF5 file of several datasets whose elements arrive in pieces, atomically as write_npy. HDF5 1.8
/// and later, and h5py, can read it; pinflow reads back the same types. The file has no attributes. Equal
/// arrays give equal files. Not thread-safe. A moved-from writer throws invalid_argument.
class hdf5_writer {
 public:
    /// A dataset to be written: C order, either byte order.
    struct dataset {
        std::string name;  ///< its path: "group/data"; the groups in it are created
        pinflow::dtype dtype;
        shape_vector shape;
        /// 0 stores the elements contiguously, so that they can be mapped. 1 (fast) to 12 (small) are
        /// libdeflate's levels: the elements are stored in chunks, shuffled and deflated. zlib has no level
        /// above 9, so the file records 9 for higher levels. A dataset without axes or elements is never
        /// chunked.
        unsigned deflate_level = 0;
        /// The shape of a chunk. Empty: as many consecutive elements as fit into 1 MiB, in whole rows if a
        /// row is smaller than that.
        // NOLINTNEXTLINE(readability-redundant-member-init): g++ warns where it is left out
        shape_vector chunk_shape = {};
    };

    /// Begins a file. Contiguous elements begin at a multiple of `alignment_bytes`.
    /// @throws invalid_argument unless `alignment_bytes` is a power of two from 16 to 2 MiB.
    /// @throws system_failure if the file cannot be created.
    explicit hdf5_writer(const std::filesystem::path& path, std::uint64_t alignment_bytes = 4096);
    hdf5_writer(hdf5_writer&&) noexcept;
    hdf5_writer& operator=(hdf5_writer&&) noexcept;
    /// Discards the file unless `finish` has put it in place.
    ~hdf5_writer();

    /// Checks, before anything is written, whether all of these datasets can be written.
    /// @throws what `begin` would throw for each, in this order, except for a lack of memory.
    void check(std::span<const dataset> datasets) const;
    /// Begins a dataset; the dataset before must be complete. The rows of a chunked dataset are buffered
    /// in whole bands; a band is the set of chunks that hold the same rows. The buffer has room for two
    /// chunks per core, or for 1 MiB of chunks if that is more. It takes at most 64 MiB, unless one band is
    /// larger. Encoding takes three times the size of the chunks in flight, which are at most two per core:
    /// at most 192 MiB, or three times the size of a chunk of more than 64 MiB. If memory is short, the
    /// buffer has less room, and fewer chunks are in flight.
    /// @throws invalid_argument for a name that is empty, not UTF-8, already used, the name of a group, or
    /// within a dataset; for a name with a zero byte, or with the parts "", "." or ".."; for a deflate_level
    /// above 12; for a chunk_shape if deflate_level is 0; for chunks that are longer than the dataset or that
    /// HDF5 does not allow.
    /// @throws unsupported for types that HDF5 lacks (`<U5`, float8_e4m3fn, fields with titles, ...), and for
    /// more than 32 axes; system_failure.
    void begin(const dataset& begun);
    /// Appends elements to the current dataset; a piece may end within an element.
    /// @throws invalid_argument for more bytes than the shape has; system_failure.
    void write(std::span<const std::byte> bytes);
    /// Makes the file durable and renames it into place. If only the last step fails, fsync of the folder,
    /// the new file is in place but may not survive a power failure.
    /// @throws invalid_argument if bytes are missing; system_failure.
    void finish();

 private:
    struct state;
    state& valid_state() const;

    std::unique_ptr<state> state_;
};

}  // namespace pinflow
