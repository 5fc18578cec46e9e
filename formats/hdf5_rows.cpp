#include "formats/hdf5_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "formats/hdf5_chunk_reader.hpp"
#include "formats/hdf5_content.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"
#include "src/core/source_check.hpp"
#include "src/core/stack.hpp"

namespace pinflow::detail {

namespace {

/// The smallest block of elements to read ahead, even if `memory_bytes` is less.
constexpr std::uint64_t min_block_bytes = 64 << 10;
/// The most memory for decoding the chunks of one element stream.
constexpr std::uint64_t max_decoding_bytes = std::uint64_t{256} << 20;

std::string label_of(const hdf5_dataset& dataset) {
    return array_label(dataset.file->path(), dataset.description->name);
}

/// The dataset as messages call it: 'a.h5:group/data'.
std::string spelled(const hdf5_dataset& dataset) {
    return fmt::format("'{}'", label_of(dataset));
}

// ---- rows -----------------------------------------------------------------------------------------------

/// The memory that reading rows takes, in addition to the destination.
std::uint64_t decoding_bytes(const hdf5_description& description, const hdf5_memory& memory) {
    std::uint64_t chunk_bytes = 0;
    if (!description.chunk_shape.empty())
        chunk_bytes = element_count(description.chunk_shape) * description.dtype.size_bytes();
    switch (description.storage) {
        case hdf5_storage::chunked:
            // one cached chunk, and three buffers to decode another one
            return std::max(memory.size_bytes(), 4 * chunk_bytes);
        case hdf5_storage::library:
            return hdf5_library_cache_bytes + 3 * chunk_bytes;
        case hdf5_storage::contiguous:
        case hdf5_storage::compact:
        case hdf5_storage::absent:
            break;
    }
    return 0;
}

/// Checks that there is enough memory to decode one chunk.
/// @throws system_failure if there is not.
void require_chunk_memory(const hdf5_dataset& dataset) {
    const hdf5_description& description = *dataset.description;
    const std::uint64_t chunk_bytes =
        description.chunk_shape.empty()
            ? 0
            : saturated(element_count(description.chunk_shape), description.dtype.size_bytes());
    // one cached chunk, and three buffers to decode another one
    const std::uint64_t needed_bytes = saturated(chunk_bytes, 4);
    require_memory(needed_bytes, fmt::format("{}: decoding chunks of {} bytes takes {} bytes of memory",
                                             spelled(dataset), chunk_bytes, needed_bytes));
}

std::unique_ptr<hdf5_content> open_with_memory(const hdf5_dataset& dataset,
                                               const hdf5_reader_options& options) {
    require_chunk_memory(dataset);
    return open_hdf5_content(dataset, options);
}

class hdf5_rows final : public row_source {
 public:
    hdf5_rows(const hdf5_dataset& dataset, std::shared_ptr<hdf5_memory> memory)
        : file_(dataset.file),
          description_(spelled(dataset)),
          memory_(std::move(memory)),
          content_(open_with_memory(dataset, {memory_, false})),
          extents_(content_->map_extents()),
          memory_bytes_(extents_.empty() ? decoding_bytes(*dataset.description, *memory_) : 0),
          dtype_(dataset.description->dtype.little_endian()),
          row_shape_(dataset.description->shape.begin() + 1, dataset.description->shape.end()),
          row_count_(dataset.description->shape[0]),
          row_size_bytes_(element_count(row_shape_) * dtype_.size_bytes()) {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept override { return row_size_bytes_; }
    std::string description() const override { return description_; }
    std::span<const row_extent> extents() const noexcept override { return extents_; }
    std::string no_extents_reason() const override { return content_->no_extents_reason(); }
    bool file_backed() const noexcept override { return true; }
    std::uint64_t memory_bytes() const noexcept override { return memory_bytes_; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override;
    void check_unchanged() const override { file_->check_unchanged(); }

 private:
    std::shared_ptr<const input_file> file_;
    std::string description_;
    std::shared_ptr<hdf5_memory> memory_;
    std::unique_ptr<hdf5_content> content_;
    std::vector<row_extent> extents_;
    std::uint64_t memory_bytes_;
    pinflow::dtype dtype_;
    shape_vector row_shape_;
    std::uint64_t row_count_;
    std::uint64_t row_size_bytes_;
};

std::chrono::nanoseconds hdf5_rows::read_rows(std::span<const std::uint64_t> ids,
                                              std::span<std::byte> destination) const {
    check_row_request(*this, ids, destination);
    if (destination.empty()) return {};
    return content_->read(runs_of(ids), destination);
}

// ---- elements -------------------------------------------------------------------------------------------

/// Reads ahead, a block at a time. Blocks begin at multiples of `item_bytes`. After a skip, a block may begin
/// before the position; its first bytes are dropped. If none are dropped, and the block fits into the
/// destination, it is read directly to it.
class block_elements : public element_stream {
 public:
    explicit block_elements(const hdf5_dataset& dataset)
        : file_(dataset.file),
          name_(spelled(dataset)),
          dtype_(dataset.description->dtype.little_endian()),
          shape_(dataset.description->shape),
          size_bytes_(payload_bytes(*dataset.description)) {}

    const pinflow::dtype& dtype() const noexcept final { return dtype_; }
    const shape_vector& shape() const noexcept final { return shape_; }
    void read(std::span<std::byte> destination) final;
    bool skip(std::uint64_t size_bytes) final {
        position_ += size_bytes;
        block_ = block_.subspan(std::min<std::uint64_t>(size_bytes, block_.size()));
        return true;
    }
    bool select(std::size_t axis, std::uint64_t begin, std::uint64_t end) override {
        if (axis != 0) return false;
        const std::uint64_t row_bytes = shape_[0] == 0 ? 0 : size_bytes_ / shape_[0];
        position_ = begin * row_bytes;
        end_ = end * row_bytes;
        block_ = {};
        return true;
    }
    void finish() final { file_->check_unchanged(); }

 protected:
    virtual std::uint64_t item_bytes() const = 0;
    /// The size of a block that begins at byte `begin`; at most the bytes that are left.
    virtual std::uint64_t block_bytes(std::uint64_t begin) const = 0;
    virtual void read_block(std::uint64_t begin, std::span<std::byte> destination) const = 0;
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    /// Continues with the first of `size_bytes` elements.
    void begin_again(std::uint64_t size_bytes) noexcept {
        size_bytes_ = end_ = size_bytes;
        position_ = 0;
        block_ = {};
    }

 private:
    std::shared_ptr<const input_file> file_;
    std::string name_;
    pinflow::dtype dtype_;
    shape_vector shape_;
    std::uint64_t size_bytes_;
    std::uint64_t end_ = size_bytes_;  // of what is read
    std::uint64_t position_ = 0;
    memory_region memory_;
    std::span<const std::byte> block_;  // the part of it not delivered yet
};

void block_elements::read(std::span<std::byte> destination) {
    if (destination.size() % dtype_.size_bytes() != 0 ||
        destination.size() > end_ - std::min(position_, end_)) {
        throw invalid_argument(fmt::format(
            "cannot read {} bytes at byte {} of {}, in elements of {} bytes: its part that is read "
            "ends at byte {}",
            destination.size(), position_, name_, dtype_.size_bytes(), end_));
    }
    while (!destination.empty()) {
        if (block_.empty()) {
            const std::uint64_t item = item_bytes();
            const std::uint64_t skipped = position_ % item;  // bytes of the block that are not delivered
            const std::uint64_t begin = position_ - skipped;
            const std::uint64_t count = std::min(block_bytes(begin), rounded_up(end_ - begin, item));
            if (skipped == 0 && count <= destination.size()) {
                read_block(position_, destination.first(count));
                position_ += count;
                destination = destination.subspan(count);
                continue;
            }
            if (memory_.size_bytes() < count) {
                memory_ = {};  // release it before allocating the larger one
                memory_ = memory_region::anonymous(count);
            }
            read_block(begin, memory_.bytes().first(count));
            block_ = memory_.bytes().first(count).subspan(skipped);
        }
        const std::size_t count = std::min(block_.size(), destination.size());
        std::memcpy(destination.data(), block_.data(), count);
        position_ += count;
        block_ = block_.subspan(count);
        destination = destination.subspan(count);
    }
}

/// Blocks of whole rows, for datasets whose rows are small or cannot be split. If the content reads boxes,
/// only the selected part of each row is read.
class row_elements final : public block_elements {
 public:
    row_elements(const hdf5_dataset& dataset, std::uint64_t memory_bytes)
        : block_elements(dataset),
          content_(open_with_memory(dataset, {})),
          memory_bytes_(std::max(memory_bytes, min_block_bytes)),
          first_(shape().size(), 0),
          lengths_(shape()) {
        if (lengths_.empty()) lengths_ = {1};
        choose_rows();
        check_fits_memory(dataset, row_bytes_);
    }

    bool select(std::size_t axis, std::uint64_t begin, std::uint64_t end) override {
        if (!content_->reads_boxes()) return block_elements::select(axis, begin, end);
        is_box_ = true;
        first_[axis] = begin;
        lengths_[axis] = end - begin;
        begin_again(element_count(lengths_) * dtype().size_bytes());
        choose_rows();
        return true;
    }

 protected:
    std::uint64_t item_bytes() const override { return row_bytes_; }
    std::uint64_t block_bytes(std::uint64_t begin) const override {
        return std::min(rows_at_once_, lengths_[0] - begin / row_bytes_) * row_bytes_;
    }
    void read_block(std::uint64_t begin, std::span<std::byte> destination) const override {
        const std::uint64_t first_row = begin / row_bytes_, count = destination.size() / row_bytes_;
        if (!is_box_) {
            const hdf5_row_run run{first_row, count, 0};
            content_->read({&run, 1}, destination);
            return;
        }
        shape_vector first(first_), lengths(lengths_);
        first[0] += first_row;
        lengths[0] = count;
        content_->read_box(first, lengths, destination);
    }

 private:
    void choose_rows() {
        row_bytes_ = lengths_[0] == 0 ? 0 : size_bytes() / lengths_[0];
        rows_at_once_ = std::max<std::uint64_t>(memory_bytes_ / std::max<std::uint64_t>(row_bytes_, 1), 1);
    }

    std::unique_ptr<const hdf5_content> content_;
    std::uint64_t memory_bytes_;
    bool is_box_ = false;  ///< a part was selected
    // along every axis: the first index that is delivered, and the number of indices
    shape_vector first_;
    shape_vector lengths_;
    std::uint64_t row_bytes_ = 0;  ///< of what is delivered
    std::uint64_t rows_at_once_ = 1;
};

/// The fill value, any number of times.
class absent_elements final : public block_elements {
 public:
    explicit absent_elements(const hdf5_dataset& dataset)
        : block_elements(dataset),
          description_(dataset.description),
          swap_(description_->dtype),
          lengths_(shape()) {}

    bool select(std::size_t axis, std::uint64_t begin, std::uint64_t end) override {
        lengths_[axis] = end - begin;
        begin_again(element_count(lengths_) * dtype().size_bytes());
        return true;
    }

 protected:
    std::uint64_t item_bytes() const override { return description_->dtype.size_bytes(); }
    std::uint64_t block_bytes(std::uint64_t begin) const override {
        return std::min(std::max<std::uint64_t>(min_block_bytes / item_bytes(), 1) * item_bytes(),
                        size_bytes() - begin);
    }
    void read_block(std::uint64_t, std::span<std::byte> destination) const override {
        fill_elements(destination, description_->fill);
        swap_.apply(destination);
    }

 private:
    std::shared_ptr<const hdf5_description> description_;
    swap_plan swap_;
    shape_vector lengths_;  // along every axis: the number of indices that are delivered
};

/// Blocks that end where chunks do, as far as memory allows.
class chunk_elements final : public block_elements {
 public:
    chunk_elements(const hdf5_dataset& dataset, std::uint64_t memory_bytes,
                   std::shared_ptr<const hdf5_chunk_reader> reader)
        : block_elements(dataset),
          reader_(std::move(reader)),
          max_block_bytes_(std::max(memory_bytes / 2, min_block_bytes)),
          first_(shape().size(), 0),
          lengths_(shape()) {
        choose_blocks();
    }

    bool select(std::size_t axis, std::uint64_t begin, std::uint64_t end) override {
        first_[axis] = begin;
        lengths_[axis] = end - begin;
        begin_again(element_count(lengths_) * dtype().size_bytes());
        choose_blocks();
        return true;
    }

 protected:
    std::uint64_t item_bytes() const override { return axis_bytes_; }
    std::uint64_t block_bytes(std::uint64_t begin) const override {
        const std::uint64_t length = reader_->grid().chunk_shape()[axis_];
        const std::uint64_t index = begin / axis_bytes_ % lengths_[axis_];
        std::uint64_t count = std::min(count_, lengths_[axis_] - index);
        // a block may begin inside a chunk; it ends at the end of one
        count = std::min(count, std::max(count_, length) - (first_[axis_] + index) % length);
        return count * axis_bytes_;
    }

    void read_block(std::uint64_t begin, std::span<std::byte> destination) const override {
        const std::uint64_t count = destination.size() / axis_bytes_;
        std::uint64_t rest = begin / axis_bytes_;
        shape_vector first(first_.begin() + 1, first_.end());
        shape_vector end(first);
        for (std::size_t axis = 1; axis < first_.size(); ++axis)
            end[axis - 1] += lengths_[axis];
        // one index along every axis before the block's
        for (std::size_t axis = axis_; axis > 0; --axis) {
            first[axis - 1] = first_[axis] + rest % lengths_[axis];
            end[axis - 1] = first[axis - 1] + (axis == axis_ ? count : 1);
            rest /= lengths_[axis];
        }
        const hdf5_row_run run{first_[0] + rest, axis_ == 0 ? count : 1, 0};
        const hdf5_row_box box(reader_->grid(), std::move(first), std::move(end));
        reader_->read({&run, 1}, box, destination);
    }

 private:
    void choose_blocks() {
        // the first axis of which at least one index fits
        axis_ = lengths_.size() - 1;
        axis_bytes_ = dtype().size_bytes();
        while (axis_ > 0 && axis_bytes_ * lengths_[axis_] <= max_block_bytes_)
            axis_bytes_ *= lengths_[axis_--];
        count_ = std::max<std::uint64_t>(max_block_bytes_ / std::max<std::uint64_t>(axis_bytes_, 1), 1);
        const std::uint64_t length = reader_->grid().chunk_shape()[axis_];
        if (count_ >= length) {
            count_ -= count_ % length;
        } else {  // parts of nearly equal size
            const std::uint64_t parts = (length - 1) / count_ + 1;
            count_ = (length - 1) / parts + 1;
        }
    }

    std::shared_ptr<const hdf5_chunk_reader> reader_;
    std::uint64_t max_block_bytes_;
    // along every axis: the first index that is delivered, and the number of indices
    shape_vector first_;
    shape_vector lengths_;
    std::size_t axis_ = 0;  // a block spans up to `count_` indices of this axis, and all later axes in full
    std::uint64_t axis_bytes_ = 1;  // of one index
    std::uint64_t count_ = 1;
};

}  // namespace

// ---- the ways to open it --------------------------------------------------------------------------------

namespace {

array map_contiguous(const hdf5_dataset& dataset) {
    const hdf5_description& description = *dataset.description;
    return array::of_file(dataset.file, description.offset_bytes, description.dtype, description.shape)
        .labelled(label_of(dataset));
}

}  // namespace

std::shared_ptr<const row_source> make_hdf5_rows(const hdf5_dataset& dataset,
                                                 std::shared_ptr<hdf5_memory> memory) {
    check_dataset(dataset);
    if (dataset.description->shape.empty()) {
        throw unsupported(fmt::format("{} is one element without axes, so it has no rows", spelled(dataset)));
    }
    if (dataset.description->storage == hdf5_storage::contiguous) return map_contiguous(dataset).rows();
    return std::make_shared<const hdf5_rows>(dataset, std::move(memory));
}

std::shared_ptr<const row_source> make_hdf5_row(const hdf5_dataset& dataset,
                                                std::shared_ptr<hdf5_memory> memory) {
    if (dataset.description->shape.empty()) return one_row_of(make_hdf5_array(dataset));
    return one_row_of(make_hdf5_rows(dataset, std::move(memory)));
}

array make_hdf5_array(const hdf5_dataset& dataset) {
    check_dataset(dataset);
    const hdf5_description& description = *dataset.description;
    if (description.storage == hdf5_storage::contiguous) return map_contiguous(dataset);
    hdf5_reader_options options;
    options.as_stored = true;
    const std::uint64_t size_bytes = payload_bytes(description);
    check_fits_memory(dataset, size_bytes);
    const auto content = open_with_memory(dataset, options);
    memory_region memory = memory_region::anonymous(size_bytes);
    if (size_bytes > 0) {
        const hdf5_row_run all{0, description.shape.empty() ? 1 : description.shape[0], 0};
        content->read({&all, 1}, memory.bytes());
    }
    return array::of_memory(std::move(memory), description.dtype, description.shape, false,
                            hdf5_storage_reason(description) + "; it is read into memory")
        .labelled(label_of(dataset));
}

std::shared_ptr<const hdf5_chunk_reader> make_hdf5_chunk_reader(const hdf5_dataset& dataset,
                                                                std::shared_ptr<hdf5_memory> memory) {
    check_dataset(dataset);
    require_chunk_memory(dataset);
    return std::make_shared<const hdf5_chunk_reader>(dataset.file, dataset.description,
                                                     hdf5_reader_options{std::move(memory), false});
}

std::unique_ptr<element_stream> make_hdf5_elements(const hdf5_dataset& dataset, std::uint64_t memory_bytes,
                                                   std::shared_ptr<const hdf5_chunk_reader> reader) {
    if (!reader) check_dataset(dataset);  // a reader has been made of a dataset that was checked
    switch (dataset.description->storage) {
        case hdf5_storage::contiguous:
            return stream_elements(map_contiguous(dataset), memory_bytes);
        case hdf5_storage::chunked:
            if (!reader) {
                reader = make_hdf5_chunk_reader(
                    dataset,
                    std::make_shared<hdf5_memory>(0, std::min(memory_bytes / 2, max_decoding_bytes)));
            }
            return std::make_unique<chunk_elements>(dataset, memory_bytes, std::move(reader));
        case hdf5_storage::absent:
            return std::make_unique<absent_elements>(dataset);
        case hdf5_storage::compact:
        case hdf5_storage::library:
            break;
    }
    return std::make_unique<row_elements>(dataset, memory_bytes);
}

}  // namespace pinflow::detail
