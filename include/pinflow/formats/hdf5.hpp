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
/// mapped, chunks filtered by shuffle, deflate, fletcher32 and lzf are decoded by all cores. Only what those
/// cannot read (other filters that libhdf5 itself has, datasets with chunks beyond counting) is read by
/// libhdf5, one thread at a time. Filter plugins are never loaded, other files never opened.
///
/// Libhdf5's filters take sizes in damaged chunks for granted, and make elements up from whatever is in
/// memory then. Each chunk is therefore checked before libhdf5 decodes it: one of scale-offset or n-bit that
/// is too short, or whose filter was told of another chunk, is refused, and so is one of szip that promises
/// another size. What szip makes of damaged bytes nobody can tell beforehand: it may leave the end of a chunk
/// as memory was. The tool has such chunks decoded twice, with other bytes in free memory, and refuses what
/// differs; this does not go with other threads in the process, so that here the rest of a damaged chunk of
/// szip may be anything. The same is true of filters that the application has registered with libhdf5, and of
/// compression that was applied before a filter that only libhdf5 has. (Damaged bytes that make other
/// elements of the right size are noticed where a checksum covers them, as fletcher32 does.)
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
    /// half for decoding. Where that is less than four chunks take, those are taken all the same.
    /// Where each chunk lies takes 25 bytes of it besides, and libhdf5 64 MiB for what only it can read.
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
        /// 0 lets the elements lie together, so that they can be mapped. From 1 (fast) to 12 (small), which
        /// are libdeflate's, they lie in chunks, shuffled and deflated. Of more than 9, which zlib lacks, the
        /// file says 9. A dataset without axes or without elements never lies in chunks.
        unsigned deflate_level = 0;
        /// Of the chunks; empty for as many elements that follow each other as 1 MiB holds, whole rows if
        /// they are smaller.
        // NOLINTNEXTLINE(readability-redundant-member-init): g++ warns where it is left out
        shape_vector chunk_shape = {};
    };

    /// Elements that lie together begin at a multiple of `alignment_bytes`, a power of two from 16 to 2 MiB.
    explicit hdf5_writer(const std::filesystem::path& path, std::uint64_t alignment_bytes = 4096);
    hdf5_writer(hdf5_writer&&) noexcept;
    hdf5_writer& operator=(hdf5_writer&&) noexcept;
    /// Without `finish`, what was written is thrown away.
    ~hdf5_writer();

    /// Finds out whether all of these can be written, before any is. @throws what `begin` would throw of
    /// them, one after the other.
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
