#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <vector>

#include "formats/hdf5_handles.hpp"
#include "formats/hdf5_library.hpp"
#include "formats/hdf5_library_filters.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"

/// Rows that only the library can read.
namespace pinflow::detail {

namespace hdf5 {

namespace {

/// Reads the elements of a box, in C order.
void read_box(const object_handle& dataset, const type_handle& type, std::span<const ::hsize_t> lengths,
              std::span<const ::hsize_t> begin, std::span<const ::hsize_t> block, std::byte* destination) {
    const int rank = static_cast<int>(lengths.size());
    const space_handle from(::H5Screate_simple(rank, lengths.data(), nullptr), "its rows cannot be selected");
    const space_handle to(::H5Screate_simple(rank, block.data(), nullptr), "its rows cannot be selected");
    checked(::H5Sselect_hyperslab(from.id(), H5S_SELECT_SET, begin.data(), nullptr, block.data(), nullptr),
            "its rows cannot be selected");
    checked(::H5Dread(dataset.id(), type.id(), to.id(), from.id(), H5P_DEFAULT, destination),
            "its rows cannot be read");
}

/// For its lifetime, newly allocated memory is filled with a given byte.
class marked_memory {
 public:
    explicit marked_memory(std::uint8_t mark) {
        // glibc fills newly allocated memory, except small blocks in the thread cache. These are allocated,
        // filled and freed here.
        ::mallopt(M_PERTURB, static_cast<std::uint8_t>(~mark));
        static void* (*volatile const fill)(void*, int, std::size_t) =
            std::memset;  // volatile, so that it is not optimised away
        constexpr std::size_t max_small_bytes = 1032;
        constexpr std::size_t step_bytes = 16;
        constexpr std::size_t max_cached_blocks = 8;
        std::vector<std::unique_ptr<std::byte[]>> blocks;
        blocks.reserve(max_cached_blocks * (max_small_bytes / step_bytes));
        for (std::size_t size_bytes = 24; size_bytes <= max_small_bytes; size_bytes += step_bytes) {
            for (std::size_t count = 0; count < max_cached_blocks; ++count) {
                blocks.push_back(std::make_unique_for_overwrite<std::byte[]>(size_bytes));
                fill(blocks.back().get(), mark, size_bytes);
            }
        }
    }
    marked_memory(const marked_memory&) = delete;
    marked_memory& operator=(const marked_memory&) = delete;
    ~marked_memory() { ::mallopt(M_PERTURB, 0); }
};

// ---- chunks ----------------------------------------------------------------------------------------------

/// Checks the chunks of a dataset before the library decodes them.
class chunk_check {
 public:
    /// `opened` and `dataset` must outlive it.
    chunk_check(std::shared_ptr<const input_file> file, const open_file& opened, const object_handle& dataset,
                hdf5_description description, hdf5_unverified_chunks unverified)
        : file_(std::move(file)),
          description_(std::move(description)),
          unverified_(unverified),
          finder_(opened, dataset, description_),
          filters_(description_.filters,
                   element_count(description_.chunk_shape) * description_.dtype.size_bytes()) {}

    /// Checks the chunks that hold parts of a box. `lengths` and `type` are those of the dataset itself.
    void check_box(std::span<const ::hsize_t> begin, std::span<const ::hsize_t> block,
                   std::span<const ::hsize_t> lengths, const type_handle& type);

 private:
    void check(std::span<const ::hsize_t> position, std::span<const ::hsize_t> lengths,
               const type_handle& type);
    bool is_same_twice(std::span<const ::hsize_t> position, std::span<const ::hsize_t> lengths,
                       const type_handle& type);

    /// Limit on the number of remembered good chunks.
    static constexpr std::size_t max_remembered = std::size_t{1} << 20;

    std::shared_ptr<const input_file> file_;
    hdf5_description description_;
    hdf5_unverified_chunks unverified_;
    chunk_finder finder_;
    hdf5_library_filters filters_;
    std::unordered_set<std::uint64_t> good_;  // numbers of chunks, in C order
    std::vector<std::byte> stored_;
    // the same dataset, without a chunk cache; closed in reverse order
    std::optional<open_file> forgetful_;
    object_handle forgetful_dataset_;
};

void chunk_check::check_box(std::span<const ::hsize_t> begin, std::span<const ::hsize_t> block,
                            std::span<const ::hsize_t> lengths, const type_handle& type) {
    const shape_vector& chunk_shape = description_.chunk_shape;
    const auto first_along = [&](std::size_t axis) { return begin[axis] - begin[axis] % chunk_shape[axis]; };
    std::vector<::hsize_t> position;
    for (std::size_t axis = 0; axis < lengths.size(); ++axis)
        position.push_back(first_along(axis));
    for (;;) {
        std::uint64_t number = 0;
        for (std::size_t along = 0; along < lengths.size(); ++along) {
            const std::uint64_t chunks = (lengths[along] - 1) / chunk_shape[along] + 1;
            number = number * chunks + position[along] / chunk_shape[along];
        }
        if (!good_.contains(number)) {
            check(position, lengths, type);
            if (good_.size() == max_remembered) good_.clear();
            good_.insert(number);
        }
        std::size_t axis = lengths.size();
        while (axis-- > 0) {  // the next chunk, in C order
            position[axis] += chunk_shape[axis];
            if (position[axis] < begin[axis] + block[axis]) break;
            position[axis] = first_along(axis);
        }
        if (axis == std::size_t(-1)) return;
    }
}

void chunk_check::check(std::span<const ::hsize_t> position, std::span<const ::hsize_t> lengths,
                        const type_handle& type) {
    hdf5_chunk chunk;
    try {
        chunk = finder_.find(position);
    } catch (const format_error& failure) {
        throw format_error(fmt::format("it {}", failure.what()));
    }
    if (chunk.size_bytes == 0) return;
    const auto damaged = [&](std::string_view what) {
        throw format_error(fmt::format("its chunk at {}, {} bytes at offset {}, {}",
                                       to_string(shape_vector(position.begin(), position.end())),
                                       chunk.size_bytes, chunk.offset_bytes, what));
    };
    if (chunk.offset_bytes > file_->size_bytes() ||
        chunk.size_bytes > file_->size_bytes() - chunk.offset_bytes) {
        damaged(fmt::format("extends past the end of the file, which has {} bytes", file_->size_bytes()));
    }
    stored_.resize(static_cast<std::size_t>(chunk.size_bytes));
    file_->read(chunk.offset_bytes, stored_);
    bool is_sure = false;
    try {
        is_sure = filters_.check(chunk.filter_mask, stored_);
    } catch (const format_error& failure) {
        damaged(failure.what());
    }
    if (!is_sure && unverified_ == hdf5_unverified_chunks::decoded_twice &&
        !is_same_twice(position, lengths, type))
        damaged("is damaged: libhdf5 decoded it twice with different results");
}

bool chunk_check::is_same_twice(std::span<const ::hsize_t> position, std::span<const ::hsize_t> lengths,
                                const type_handle& type) {
    if (!forgetful_) {
        forgetful_.emplace(*file_, 0);
        link_access links;
        forgetful_dataset_ = open_dataset(*forgetful_, description_.name, links);
    }
    std::vector<::hsize_t> block(lengths.size());
    std::uint64_t size_bytes = ::H5Tget_size(type.id());
    for (std::size_t axis = 0; axis < lengths.size(); ++axis) {
        block[axis] = std::min<std::uint64_t>(description_.chunk_shape[axis], lengths[axis] - position[axis]);
        size_bytes *= block[axis];
    }
    constexpr std::uint8_t marks[] = {0x5A, 0xA5};
    std::vector<std::byte> read[2];
    for (std::size_t time = 0; time < 2; ++time) {
        read[time].assign(static_cast<std::size_t>(size_bytes), std::byte{marks[time]});
        const marked_memory marked(marks[time]);
        read_box(forgetful_dataset_, type, lengths, position, block, read[time].data());
    }
    return read[0] == read[1];
}

}  // namespace

}  // namespace hdf5

// ---- rows ------------------------------------------------------------------------------------------------

struct hdf5_library_reader::state {
    std::shared_ptr<const input_file> file;
    std::string name;
    std::uint64_t row_count = 1;
    std::uint64_t row_bytes = 0;
    shape_vector shape;  ///< with the axes of an array type
    // closed in reverse order
    std::optional<hdf5::open_file> opened;
    hdf5::object_handle dataset;
    hdf5::type_handle type;
    std::optional<hdf5::chunk_check> chunks;
    std::vector<::hsize_t> lengths;  ///< of the dataset itself, without the axes of an array type
    shape_vector chunk_lengths;      ///< of chunks; empty when there are none

    void open(const hdf5_description& description, hdf5_unverified_chunks unverified);
    void read(std::uint64_t first_row, std::uint64_t count, std::span<std::byte> destination);
    void read_box(std::vector<::hsize_t> begin, std::vector<::hsize_t> block,
                  std::span<std::byte> destination);
    std::uint64_t rows_at_once(std::span<const ::hsize_t> begin,
                               std::span<const ::hsize_t> block) const noexcept;
};

void hdf5_library_reader::state::open(const hdf5_description& description,
                                      hdf5_unverified_chunks unverified) {
    // a chunk should not be decoded again for each of its rows
    opened.emplace(*file, hdf5_library_cache_bytes);
    hdf5::link_access links;
    dataset = hdf5::open_dataset(*opened, description.name, links);
    hdf5_description now = hdf5::describe(*opened, dataset, description.name, hdf5::detail_wanted::listing);
    if (now.dtype != description.dtype || now.shape != description.shape ||
        now.chunk_shape != description.chunk_shape || now.filters != description.filters) {
        throw data_changed(
            fmt::format("'{}' changed while it was read: the dataset {} has another type, shape, chunk "
                        "shape or list of filters",
                        file->path(), quote(description.name)));
    }
    type = {::H5Dget_type(dataset.id()), "its type cannot be read"};
    const hdf5::space_handle space(::H5Dget_space(dataset.id()), "its shape cannot be read");
    const int rank = hdf5::checked(::H5Sget_simple_extent_ndims(space.id()), "its shape cannot be read");
    lengths.resize(static_cast<std::size_t>(rank));
    hdf5::checked(::H5Sget_simple_extent_dims(space.id(), lengths.data(), nullptr),
                  "its shape cannot be read");
    chunk_lengths = now.chunk_shape;
    if (!now.chunk_shape.empty()) chunks.emplace(file, *opened, dataset, std::move(now), unverified);
}

hdf5_library_reader::hdf5_library_reader(std::shared_ptr<const input_file> file,
                                         const hdf5_description& description,
                                         hdf5_unverified_chunks unverified)
    : state_(std::make_unique<state>()) {
    state_->file = file;  // not moved: error messages need `file` after state_ is reset
    hdf5::naming(*file, [&] {
        state_->name = description.name;
        state_->shape = description.shape;
        if (!description.shape.empty()) state_->row_count = description.shape.front();
        const std::uint64_t size_bytes = payload_bytes(description);
        state_->row_bytes = state_->row_count == 0 ? 0 : size_bytes / state_->row_count;
        const hdf5::library_lock lock;
        try {
            state_->open(description, unverified);
        } catch (...) {
            state_.reset();  // while the library is locked
            throw;
        }
    });
}

hdf5_library_reader::~hdf5_library_reader() {
    try {
        const hdf5::library_lock lock;
        state_.reset();
    } catch (const error&) {
        static_cast<void>(state_.release());  // the library was closed, and its handles with it
    }
}

void hdf5_library_reader::state::read(std::uint64_t first_row, std::uint64_t count,
                                      std::span<std::byte> destination) {
    if (lengths.empty()) {  // one element, whose rows the library cannot tell apart
        std::vector<std::byte> element(static_cast<std::size_t>(row_count * row_bytes));
        hdf5::checked(::H5Dread(dataset.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, element.data()),
                      "its element cannot be read");
        std::ranges::copy(
            std::span(element).subspan(static_cast<std::size_t>(first_row * row_bytes), destination.size()),
            destination.begin());
        return;
    }
    std::vector<::hsize_t> begin(lengths.size());
    std::vector<::hsize_t> block = lengths;
    begin.front() = first_row;
    block.front() = count;
    read_box(std::move(begin), std::move(block), destination);
}

void hdf5_library_reader::state::read_box(std::vector<::hsize_t> begin, std::vector<::hsize_t> block,
                                          std::span<std::byte> destination) {
    // the library may leave unwritten elements unchanged
    std::ranges::fill(destination, std::byte{});
    std::uint64_t count = block.front();
    const std::uint64_t band_bytes = destination.size() / count;  // of one index of the first axis
    for (; count > 0; begin.front() += block.front()) {
        block.front() = count;
        block.front() = std::min(count, rows_at_once(begin, block));
        if (chunks) chunks->check_box(begin, block, lengths, type);
        hdf5::read_box(dataset, type, lengths, begin, block, destination.data());
        destination = destination.subspan(static_cast<std::size_t>(block.front() * band_bytes));
        count -= block.front();
    }
}

/// The number of rows of a box to read at once. Reading many chunks at once is far slower per chunk: 10 times
/// for 10^6 chunks.
std::uint64_t hdf5_library_reader::state::rows_at_once(std::span<const ::hsize_t> begin,
                                                       std::span<const ::hsize_t> block) const noexcept {
    constexpr std::uint64_t max_chunks = 1024;
    if (chunk_lengths.empty()) return row_count;
    std::uint64_t chunks_per_band = 1;
    for (std::size_t axis = 1; axis < lengths.size(); ++axis) {
        const std::uint64_t last = begin[axis] + block[axis] - 1;
        chunks_per_band *= last / chunk_lengths[axis] - begin[axis] / chunk_lengths[axis] + 1;
    }
    const std::uint64_t bands = std::max<std::uint64_t>(max_chunks / chunks_per_band, 1);
    std::uint64_t rows = 0;
    if (!multiply(bands, chunk_lengths.front(), rows)) return row_count;
    return rows - begin.front() % chunk_lengths.front();  // up to the end of a chunk
}

/// Calls `work` while the library is locked. Messages name path and dataset.
template <typename Work>
void hdf5_library_reader::locked(Work work) const {
    const hdf5::library_lock lock;
    try {
        work();
    } catch (const format_error& failure) {
        throw format_error(fmt::format("cannot read the dataset {} of '{}': {}", quote(state_->name),
                                       state_->file->path(), failure.what()));
    }
}

void hdf5_library_reader::read(std::uint64_t first_row, std::uint64_t row_count,
                               std::span<std::byte> destination) const {
    state& of = *state_;
    std::uint64_t size_bytes = 0;
    if (first_row > of.row_count || row_count > of.row_count - first_row ||
        !multiply(row_count, of.row_bytes, size_bytes) || size_bytes != destination.size()) {
        throw invalid_argument(fmt::format(
            "cannot read {} rows from row {} on of the dataset {} into {} bytes: it has {} rows of {} bytes",
            row_count, first_row, quote(of.name), destination.size(), of.row_count, of.row_bytes));
    }
    if (destination.empty()) return;
    locked([&] { of.read(first_row, row_count, destination); });
}

bool hdf5_library_reader::reads_boxes() const noexcept {
    return !state_->lengths.empty() && state_->lengths.size() == state_->shape.size();
}

void hdf5_library_reader::read_box(std::span<const std::uint64_t> first,
                                   std::span<const std::uint64_t> lengths,
                                   std::span<std::byte> destination) const {
    state& of = *state_;
    bool is_inside = reads_boxes() && first.size() == of.shape.size() && lengths.size() == of.shape.size();
    std::uint64_t size_bytes = is_inside ? of.row_count * of.row_bytes : 0;  // becomes that of the box
    for (std::size_t axis = 0; is_inside && axis < first.size(); ++axis) {
        is_inside = first[axis] <= of.shape[axis] && lengths[axis] <= of.shape[axis] - first[axis];
        if (size_bytes != 0) size_bytes = size_bytes / of.shape[axis] * lengths[axis];
    }
    if (!is_inside || size_bytes != destination.size())
        throw invalid_argument(fmt::format(
            "cannot read a box of the dataset {} into {} bytes: its shape is {}, in rows of {} bytes",
            quote(of.name), destination.size(), to_string(of.shape), of.row_bytes));
    if (destination.empty()) return;
    locked([&] { of.read_box({first.begin(), first.end()}, {lengths.begin(), lengths.end()}, destination); });
}

}  // namespace pinflow::detail
