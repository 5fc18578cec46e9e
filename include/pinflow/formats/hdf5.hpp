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

/// HDF5 files. What pinflow trusts: libhdf5 reads the metadata of a file, in the calling process, and damaged
/// files are known to crash it or to keep it busy for ever (1.10.8: 24 of 20,000 single byte flips crash). So
/// only files from a source that is trusted should be opened here; the tool has a child process do it. Once
/// it is known where the data lies, pinflow's own code reads it, and trusts nothing: contiguous data is
/// mapped, chunks filtered by shuffle, deflate, fletcher32 and lzf are decoded by all cores.
/// libhdf5 reads only what this code cannot (other filters that libhdf5 itself has, datasets with more than
/// 2^24 chunks), one thread at a time. Filter plugins are never loaded, other files never opened.
///
/// libhdf5's filters trust the sizes in a damaged chunk, and then return uninitialised memory as elements. So
/// each chunk is checked before libhdf5 decodes it. A scale-offset or n-bit chunk is refused if it is too
/// short or its filter parameters are those of another chunk, an szip chunk if it declares another size.
///
/// Three kinds of damage cannot be found beforehand: szip data of the right size (szip may leave the end of
/// the chunk uninitialised), filters that the application has registered with libhdf5, and compression that
/// was applied before a filter that only libhdf5 has. The tool decodes such chunks twice, with different
/// bytes in free memory, and refuses them if the results differ. The library cannot do this, as the process
/// may have other threads: here the rest of such a chunk may hold anything. (Damage that gives wrong elements
/// of the right size is found only under a checksum, such as fletcher32.)
///
/// Strings of a fixed size are the bytes that are stored, and keep the spaces that some are padded with,
/// which h5py takes away.
///
/// All functions may be called from any thread at the same time; calls of libhdf5 take turns. A process that
/// also calls libhdf5 elsewhere at the same time needs a build of it that is made for threads.
namespace pinflow {

/// Whether this build can read and write HDF5 files.
bool has_hdf5() noexcept;

/// The datasets of a file, in groups and subgroups, by their paths ("group/data"). Each object is listed
/// once; what cannot be opened, and links that lead to other files or nowhere, are listed with the reason.
/// @throws system_failure, format_error, data_changed, unsupported (more than 2^20 links); format_not_built,
/// as all functions here, in a build without HDF5. Sentences name the path.
std::vector<array_listing> list_hdf5(const std::filesystem::path& path);

/// The same of the dataset `name`, a path within the file that soft links may be part of.
/// @throws invalid_argument when there is no such dataset, unsupported for one of a type that has no
/// elements of a fixed size (variable-length ones, references) or whose data lies in other files (external,
/// virtual); as list_hdf5.
array_listing list_hdf5(const std::filesystem::path& path, std::string_view name);

/// Opens the dataset `name`. A contiguous one is mapped where it lies; everything else is decoded into memory
/// of the process's own, as a whole. @throws as list_hdf5; system_failure when there is too little memory.
array open_hdf5(const std::filesystem::path& path, std::string_view name);

struct hdf5_options {
    /// Upper bound on the memory for chunks, in bytes: half for decoded ones that are kept for later rows,
    /// half for decoding. If four chunks need more than this, they get it.
    /// Not included: 25 bytes per chunk for its place, and 64 MiB for a dataset that only libhdf5 can read.
    std::uint64_t memory_bytes = std::uint64_t{512} << 20;
};

/// The rows of the dataset `name`, never decoded as a whole: the chunks that the rows of one `read_rows` lie
/// in are decoded once, side by side on all cores, and those used last are kept. A contiguous dataset has an
/// extent, and chunks without filters that hold whole rows have some.
/// @throws as list_hdf5; unsupported for a dataset without axes.
std::shared_ptr<const row_source> open_hdf5_rows(const std::filesystem::path& path, std::string_view name,
                                                 const hdf5_options& options = {});

/// Writes a HDF5 file of several datasets, whose elements arrive in pieces; atomically, as write_npy. HDF5
/// 1.8 and later read it, and h5py; our reader finds the types that were written. It has no attributes. Equal
/// arrays make equal files. Not thread-safe. A moved-from writer throws invalid_argument.
class hdf5_writer {
 public:
    /// A dataset to come: C order, either byte order.
    struct dataset {
        std::string name;  ///< its path: "group/data"; the groups that it leads through are made
        pinflow::dtype dtype;
        shape_vector shape;
        /// 0 stores the elements contiguously, so that they can be mapped. 1 (fast) to 12 (small) are
        /// libdeflate's levels: the elements are stored in chunks, shuffled and deflated. zlib has no level
        /// above 9, so the file records 9 for those. A dataset without axes or elements is never chunked.
        unsigned deflate_level = 0;
        /// The shape of a chunk. Empty: as many consecutive elements as fit into 1 MiB, in whole rows if a
        /// row is smaller than that.
        // NOLINTNEXTLINE(readability-redundant-member-init): g++ warns where it is left out
        shape_vector chunk_shape = {};
    };

    /// Contiguous elements begin at a multiple of `alignment_bytes`, a power of two from 16 to 2 MiB.
    explicit hdf5_writer(const std::filesystem::path& path, std::uint64_t alignment_bytes = 4096);
    hdf5_writer(hdf5_writer&&) noexcept;
    hdf5_writer& operator=(hdf5_writer&&) noexcept;
    /// Without `finish`, what was written is thrown away.
    ~hdf5_writer();

    /// Checks whether all of these can be written, before any of them is.
    /// @throws what `begin` would throw for each, in this order.
    void check(std::span<const dataset> datasets) const;
    /// Begins a dataset; the one before must be complete. One in chunks takes memory for the rows that chunks
    /// share, and up to 256 MiB more on machines of many cores.
    /// @throws invalid_argument for a name that is empty, taken, that of a group or within a dataset, that
    /// has empty parts, "." or "..", and for chunks that HDF5 does not allow; unsupported for types that HDF5
    /// lacks (`<U5`, float8_e4m3fn, fields with titles, ...) and more than 32 axes; system_failure.
    void begin(const dataset& begun);
    /// Appends elements of the dataset begun last; pieces may be cut anywhere. @throws invalid_argument past
    /// the size that the shape promises; system_failure.
    void write(std::span<const std::byte> bytes);
    /// Makes the file durable under its name. @throws invalid_argument when bytes are missing,
    /// system_failure.
    void finish();

 private:
    struct state;
    state& valid_state() const;

    std::unique_ptr<state> state_;
};

}  // namespace pinflow
