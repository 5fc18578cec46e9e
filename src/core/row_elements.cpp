#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/memory.hpp"
#include "src/core/checked.hpp"
#include "src/core/element_stream.hpp"

namespace pinflow::detail {

namespace {

/// The size of a block of rows to read at once, if `memory_bytes` allows it.
constexpr std::uint64_t wanted_block_bytes = 8 << 20;

class row_elements final : public element_stream {
 public:
    row_elements(std::shared_ptr<const row_source> rows, std::uint64_t memory_bytes)
        : rows_(std::move(rows)),
          dtype_(rows_->dtype()),
          shape_(shape_of_all_rows(*rows_)),
          block_rows_(std::max<std::uint64_t>(1, std::min(wanted_block_bytes, memory_bytes) /
                                                     std::max<std::uint64_t>(1, rows_->row_size_bytes()))) {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& shape() const noexcept override { return shape_; }

    void read(std::span<std::byte> destination) override {
        const std::uint64_t row_bytes = rows_->row_size_bytes();
        const std::uint64_t left_bytes = (rows_->row_count() - next_row_) * row_bytes + rest_.size();
        if (!is_multiple(destination.size(), dtype_.size_bytes()) || destination.size() > left_bytes) {
            throw invalid_argument(
                fmt::format("cannot read {} bytes of elements of {} bytes, of which {} are left",
                            destination.size(), dtype_.size_bytes(), left_bytes));
        }
        while (!destination.empty()) {
            if (rest_.empty() && destination.size() >= row_bytes) {
                const std::uint64_t count = std::min(destination.size() / row_bytes, block_rows_);
                read_rows(destination.first(count * row_bytes));
                destination = destination.subspan(count * row_bytes);
                continue;
            }
            if (rest_.empty()) read_block();
            const std::size_t part = std::min(rest_.size(), destination.size());
            std::memcpy(destination.data(), rest_.data(), part);
            rest_ = rest_.subspan(part);
            destination = destination.subspan(part);
        }
    }

    void finish() override { rows_->check_unchanged(); }

 private:
    /// Reads the next rows, as many as `destination` holds.
    void read_rows(std::span<std::byte> destination) {
        ids_.resize(destination.size() / rows_->row_size_bytes());
        std::iota(ids_.begin(), ids_.end(), next_row_);
        rows_->read_rows(ids_, destination);
        next_row_ += ids_.size();
    }
    void read_block() {
        const std::uint64_t count = std::min(block_rows_, rows_->row_count() - next_row_);
        const std::uint64_t size_bytes = count * rows_->row_size_bytes();
        if (memory_.size_bytes() < size_bytes) memory_ = memory_region::anonymous(size_bytes);
        const std::span<std::byte> block(memory_.data(), size_bytes);
        read_rows(block);
        rest_ = block;
    }

    std::shared_ptr<const row_source> rows_;
    pinflow::dtype dtype_;
    shape_vector shape_;
    std::uint64_t block_rows_;
    std::uint64_t next_row_ = 0;
    std::vector<std::uint64_t> ids_;
    memory_region memory_;
    std::span<const std::byte> rest_;  ///< the part of the block not delivered yet
};

}  // namespace

shape_vector shape_of_all_rows(const row_source& rows) {
    shape_vector shape{rows.row_count()};
    shape.insert(shape.end(), rows.row_shape().begin(), rows.row_shape().end());
    return shape;
}

std::unique_ptr<element_stream> stream_rows(std::shared_ptr<const row_source> rows,
                                            std::uint64_t memory_bytes) {
    return std::make_unique<row_elements>(std::move(rows), memory_bytes);
}

}  // namespace pinflow::detail
