#include "formats/hdf5_content.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/mapped_file.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"

namespace pinflow::detail {

namespace {

/// "cannot open 'data' in 'a.h5': " followed by `why`.
std::string cannot_open(const hdf5_dataset& dataset, const std::string& why) {
    return fmt::format("cannot open {} in '{}': {}", quote(dataset.description->name), dataset.file->path(),
                       why);
}

/// Null if the system refuses: rows can still be read.
std::unique_ptr<const mapped_file> map_if_possible(const std::shared_ptr<const input_file>& file,
                                                   std::uint64_t offset_bytes, std::uint64_t size_bytes) {
    try {
        return std::make_unique<const mapped_file>(file, offset_bytes, size_bytes);
    } catch (const system_failure&) {
        return nullptr;
    }
}

// ---- chunks ---------------------------------------------------------------------------------------------

class chunked_content final : public hdf5_content {
 public:
    chunked_content(const hdf5_dataset& dataset, const hdf5_reader_options& options)
        : file_(dataset.file),
          description_(dataset.description),
          as_stored_(options.as_stored || description_->dtype.is_little_endian()),
          reader_(file_, description_, options),
          all_rows_(reader_.grid()) {}

    std::chrono::nanoseconds read(std::span<const hdf5_row_run> runs,
                                  std::span<std::byte> destination) const override {
        return reader_.read(runs, all_rows_, destination);
    }
    std::vector<row_extent> map_extents() override;
    std::string no_extents_reason() const override;

 private:
    std::shared_ptr<const input_file> file_;
    std::shared_ptr<const hdf5_description> description_;
    bool as_stored_;
    hdf5_chunk_reader reader_;
    hdf5_row_box all_rows_;
    // from the first chunk in the file to the last; null if the system refused
    std::unique_ptr<const mapped_file> mapping_;
};

std::string chunked_content::no_extents_reason() const {
    if (!description_->filters.empty()) {
        return fmt::format("is stored in filtered chunks ({}), so its rows are decoded",
                           hdf5_filter_names(*description_));
    }
    if (!as_stored_) return "is big-endian, so its rows are byte-swapped when they are read";
    if (!reader_.grid().holds_whole_rows())
        return "is stored in chunks that hold parts of rows, so its rows are assembled";
    const auto missing = std::ranges::count(description_->chunks, 0u, &hdf5_chunk::size_bytes);
    if (missing > 0) {
        return fmt::format("has chunks that were never written ({} of {}), so its rows are not mapped",
                           missing, description_->chunks.size());
    }
    if (description_->chunks.empty()) return "has no rows";
    return {};
}

std::vector<row_extent> chunked_content::map_extents() {
    std::vector<row_extent> extents;
    if (!no_extents_reason().empty()) return extents;
    // one mapping for all, since their number is limited; gaps between chunks take only addresses
    const auto [first, last] =
        std::ranges::minmax_element(description_->chunks, {}, &hdf5_chunk::offset_bytes);
    mapping_ = map_if_possible(file_, first->offset_bytes,
                               last->offset_bytes + last->size_bytes - first->offset_bytes);
    const hdf5_chunk_grid& grid = reader_.grid();
    for (std::size_t index = 0; index < description_->chunks.size(); ++index) {
        const std::uint64_t offset_bytes = description_->chunks[index].offset_bytes;
        const std::uint64_t rows =
            std::min(grid.rows_per_chunk(), grid.shape()[0] - index * grid.rows_per_chunk());
        if (!extents.empty()) {
            row_extent& before = extents.back();
            if (before.offset_bytes + before.row_count * grid.chunk_row_bytes() == offset_bytes) {
                before.row_count += rows;
                continue;
            }
        }
        const std::byte* const data =
            mapping_ ? mapping_->data() + (offset_bytes - mapping_->offset_bytes()) : nullptr;
        extents.push_back({file_, offset_bytes, rows, data});
    }
    return extents;
}

// ---- other storage --------------------------------------------------------------------------------------

/// The base class for all other storage: reads one run of rows after the other.
class plain_content : public hdf5_content {
 public:
    plain_content(const hdf5_dataset& dataset, const hdf5_reader_options& options)
        : description_(dataset.description),
          row_bytes_(payload_bytes(*description_) /
                     (description_->shape.empty() ? 1 : std::max<std::uint64_t>(description_->shape[0], 1))),
          swap_(options.as_stored ? description_->dtype.little_endian() : description_->dtype) {}

    std::chrono::nanoseconds read(std::span<const hdf5_row_run> runs,
                                  std::span<std::byte> destination) const final {
        for (const hdf5_row_run& run : runs) {
            const auto rows = destination.subspan(run.position * row_bytes_, run.row_count * row_bytes_);
            read_rows(run.first_row, run.row_count, rows);
            swap_.apply(rows);
        }
        return {};
    }

 protected:
    virtual void read_rows(std::uint64_t first_row, std::uint64_t count,
                           std::span<std::byte> destination) const = 0;
    const hdf5_description& description() const noexcept { return *description_; }
    std::uint64_t row_bytes() const noexcept { return row_bytes_; }
    const swap_plan& swap() const noexcept { return swap_; }

 private:
    std::shared_ptr<const hdf5_description> description_;
    std::uint64_t row_bytes_;
    swap_plan swap_;
};

class inline_content final : public plain_content {
 public:
    using plain_content::plain_content;
    std::string no_extents_reason() const override {
        return "is stored in the file's metadata (compact), so its rows are copied from there";
    }

 protected:
    void read_rows(std::uint64_t first_row, std::uint64_t, std::span<std::byte> destination) const override {
        if (destination.empty()) return;
        std::memcpy(destination.data(), description().compact_data.data() + first_row * row_bytes(),
                    destination.size());
    }
};

class absent_content final : public plain_content {
 public:
    using plain_content::plain_content;
    std::string no_extents_reason() const override {
        return "was never written, so its rows are the fill value";
    }

 protected:
    void read_rows(std::uint64_t, std::uint64_t, std::span<std::byte> destination) const override {
        fill_elements(destination, description().fill);
    }
};

class library_content final : public plain_content {
 public:
    library_content(const hdf5_dataset& dataset, const hdf5_reader_options& options)
        : plain_content(dataset, options), library_(dataset.library) {
        if (!library_) {
            throw unsupported(cannot_open(
                dataset, fmt::format("only libhdf5 can read it: {}", description().library_reason)));
        }
    }
    std::string no_extents_reason() const override {
        return fmt::format("is read by libhdf5: {}", description().library_reason);
    }
    bool reads_boxes() const noexcept override { return library_.reads_boxes(); }
    void read_box(std::span<const std::uint64_t> first, std::span<const std::uint64_t> lengths,
                  std::span<std::byte> destination) const override {
        if (destination.empty()) return;
        library_.read_box(first, lengths, destination);
        swap().apply(destination);
    }

 protected:
    void read_rows(std::uint64_t first_row, std::uint64_t count,
                   std::span<std::byte> destination) const override {
        if (!destination.empty()) library_(first_row, count, destination);
    }

 private:
    hdf5_read_function library_;
};

}  // namespace

void hdf5_content::read_box(std::span<const std::uint64_t> /*first*/,
                            std::span<const std::uint64_t> /*lengths*/,
                            std::span<std::byte> /*destination*/) const {
    throw unsupported("the dataset is read in rows only");
}

std::unique_ptr<hdf5_content> open_hdf5_content(const hdf5_dataset& dataset,
                                                const hdf5_reader_options& options) {
    switch (dataset.description->storage) {
        case hdf5_storage::chunked:
            return std::make_unique<chunked_content>(dataset, options);
        case hdf5_storage::compact:
            return std::make_unique<inline_content>(dataset, options);
        case hdf5_storage::absent:
            return std::make_unique<absent_content>(dataset, options);
        case hdf5_storage::library:
            return std::make_unique<library_content>(dataset, options);
        case hdf5_storage::contiguous:
            break;
    }
    throw format_error(cannot_open(dataset, "it is stored in a way that pinflow does not know"));
}

void check_dataset(const hdf5_dataset& dataset) {
    try {
        check_hdf5_description(*dataset.description, dataset.file->size_bytes());
    } catch (const format_error& failure) {
        throw format_error(fmt::format("cannot open '{}': {}", dataset.file->path(), failure.what()));
    }
    if (dataset.description->dtype.size_bytes() == 0)
        throw format_error(cannot_open(dataset, "its elements have no bytes"));
}

void check_fits_memory(const hdf5_dataset& dataset, std::uint64_t size_bytes) {
    require_memory(size_bytes, cannot_open(dataset, fmt::format("it takes {} bytes of memory", size_bytes)),
                   "read it by rows, or convert it to a file that can be mapped");
}

}  // namespace pinflow::detail
