#include "src/core/element_stream.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/memory.hpp"
#include "src/core/checked.hpp"
#include "src/core/strided_reader.hpp"
#include "src/core/swap_plan.hpp"

namespace pinflow::detail {

namespace {

/// From this size on, units are read one by one as fast as in blocks.
constexpr std::uint64_t large_unit_bytes = 64 << 10;
/// The smallest block worth reordering; used even if `memory_bytes` is less.
constexpr std::uint64_t min_block_bytes = 64 << 10;
/// Reads of at least this size, and reads of all that is left, bypass the block.
constexpr std::uint64_t min_direct_bytes = std::uint64_t{32} << 20;
/// The maximum number of bytes that are read before they are swapped. They stay in a core's cache.
constexpr std::uint64_t max_swapped_bytes = 256 << 10;

class array_elements final : public element_stream {
 public:
    array_elements(const array& source, std::uint64_t memory_bytes)
        : source_(source),
          dtype_(source.dtype().little_endian()),
          swap_(source.dtype()),
          first_(source.shape().size()),
          lengths_(source.shape()),
          end_bytes_(source.size_bytes()),
          reader_(source),
          max_block_bytes_(std::max(min_block_bytes,
                                    memory_bytes - std::min(memory_bytes, strided_reader::scratch_bytes))) {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& shape() const noexcept override { return source_.shape(); }
    void read(std::span<std::byte> destination) override;
    bool skip(std::uint64_t size_bytes) override {
        position_bytes_ += size_bytes;
        block_ = block_.subspan(std::min<std::uint64_t>(size_bytes, block_.size()));
        return true;
    }
    bool select(std::size_t axis, std::uint64_t begin, std::uint64_t end) override {
        first_[axis] = begin;
        lengths_[axis] = end - begin;
        end_bytes_ = element_count(lengths_) * dtype_.size_bytes();
        reader_ = strided_reader(source_, first_, lengths_);
        position_bytes_ = 0;
        block_ = {};
        return true;
    }
    void finish() override {
        if (source_.file()) source_.file()->check_unchanged();
    }

 private:
    bool in_blocks() const noexcept { return !reader_.in_order() && reader_.unit_bytes() < large_unit_bytes; }
    void read_now(std::uint64_t begin_bytes, std::span<std::byte> destination);
    void read_block();

    array source_;
    pinflow::dtype dtype_;
    swap_plan swap_;
    // the part that is read, along each axis
    shape_vector first_;
    shape_vector lengths_;
    std::uint64_t end_bytes_;  ///< of the part
    strided_reader reader_;
    scratch_memory scratch_;
    std::uint64_t position_bytes_ = 0;

    // if the source is not in C order: reads ahead and reorders as much as the memory holds
    std::uint64_t max_block_bytes_;
    memory_region block_memory_;
    std::span<const std::byte> block_;  // the part of it not delivered yet
};

void array_elements::read(std::span<std::byte> destination) {
    if (!is_multiple(destination.size(), dtype_.size_bytes())) {
        throw invalid_argument(fmt::format("{} bytes are not a whole number of elements of {} bytes",
                                           destination.size(), dtype_.size_bytes()));
    }
    if (destination.size() > end_bytes_ - std::min(position_bytes_, end_bytes_)) {
        throw invalid_argument(fmt::format(
            "cannot read {} bytes at byte {} of an array of shape {}: its part that is read ends at "
            "byte {}",
            destination.size(), position_bytes_, to_string(shape()), end_bytes_));
    }
    const bool reads_blocks = in_blocks();
    while (!destination.empty()) {
        const bool is_direct = !reads_blocks || destination.size() >= min_direct_bytes ||
                               destination.size() == end_bytes_ - position_bytes_;
        if (block_.empty() && is_direct) {
            read_now(position_bytes_, destination);
            position_bytes_ += destination.size();
            return;
        }
        if (block_.empty()) read_block();
        const std::size_t count = std::min(block_.size(), destination.size());
        std::memcpy(destination.data(), block_.data(), count);
        position_bytes_ += count;
        block_ = block_.subspan(count);
        destination = destination.subspan(count);
    }
}

void array_elements::read_now(std::uint64_t begin_bytes, std::span<std::byte> destination) {
    const bool in_pieces = !swap_.empty() && reader_.in_order();
    const std::uint64_t piece_bytes =
        in_pieces ? std::max<std::uint64_t>(max_swapped_bytes / dtype_.size_bytes(), 1) * dtype_.size_bytes()
                  : destination.size();
    while (!destination.empty()) {
        const auto piece = destination.first(std::min<std::uint64_t>(piece_bytes, destination.size()));
        reader_.read(begin_bytes, piece, scratch_);
        swap_.apply(piece);
        begin_bytes += piece.size();
        destination = destination.subspan(piece.size());
    }
}

void array_elements::read_block() {
    const std::uint64_t end = reader_.block_end(position_bytes_, max_block_bytes_);
    const std::uint64_t size_bytes = std::min(end, end_bytes_) - position_bytes_;
    if (block_memory_.size_bytes() < size_bytes) {
        block_memory_ = {};  // release it before allocating the larger one
        block_memory_ = memory_region::anonymous(size_bytes);
    }
    const auto block = block_memory_.bytes().first(size_bytes);
    read_now(position_bytes_, block);
    block_ = block;
}

}  // namespace

std::unique_ptr<element_stream> stream_elements(const array& array, std::uint64_t memory_bytes) {
    return std::make_unique<array_elements>(array, memory_bytes);
}

}  // namespace pinflow::detail
