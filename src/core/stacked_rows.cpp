#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/extent_rows.hpp"
#include "src/core/extent_stride.hpp"
#include "src/core/source_check.hpp"
#include "src/core/stack.hpp"

namespace pinflow {

namespace {

using source_pointer = std::shared_ptr<const row_source>;

/// All rows of a source as one row.
class whole_source final : public row_source {
 public:
    explicit whole_source(source_pointer source) : source_(std::move(source)) {
        row_shape_.push_back(source_->row_count());
        row_shape_.insert(row_shape_.end(), source_->row_shape().begin(), source_->row_shape().end());
        // throws if the size overflows
        static_cast<void>(c_strides_bytes(row_shape_, dtype().size_bytes()));
        row_size_bytes_ = element_count(row_shape_) * dtype().size_bytes();
        const auto extents = source_->extents();
        if (extents.size() == 1 && detail::has_contiguous_extents(*source_))
            extent_ = {extents[0].file, extents[0].offset_bytes, 1, extents[0].data};
    }

    const pinflow::dtype& dtype() const noexcept override { return source_->dtype(); }
    const shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return 1; }
    std::uint64_t row_size_bytes() const noexcept override { return row_size_bytes_; }
    std::string description() const override { return source_->description(); }
    std::span<const row_extent> extents() const noexcept override {
        return {&extent_, static_cast<std::size_t>(extent_.row_count)};
    }
    std::string no_extents_reason() const override {
        const std::size_t pieces = source_->extents().size();
        if (pieces == 0 || extent_.row_count != 0) return source_->no_extents_reason();
        return pieces > 1 ? fmt::format("lies in {} pieces", pieces)
                          : "has rows that overlap or have gaps between them";
    }
    bool file_backed() const noexcept override { return source_->file_backed(); }
    std::uint64_t memory_bytes() const noexcept override { return source_->memory_bytes(); }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override;
    void check_unchanged() const override { source_->check_unchanged(); }

 private:
    std::chrono::nanoseconds read_whole(std::span<std::byte> destination) const;

    source_pointer source_;
    shape_vector row_shape_;
    std::uint64_t row_size_bytes_ = 0;
    row_extent extent_;  // without rows unless the source has exactly one extent, of contiguous rows
};

std::chrono::nanoseconds whole_source::read_rows(std::span<const std::uint64_t> ids,
                                                 std::span<std::byte> destination) const {
    detail::check_row_request(*this, ids, destination);
    std::chrono::nanoseconds waited{};
    for (std::size_t index = 0; index < ids.size(); ++index)
        waited += read_whole(destination.subspan(index * row_size_bytes_, row_size_bytes_));
    return waited;
}

std::chrono::nanoseconds whole_source::read_whole(std::span<std::byte> destination) const {
    // in parts: the ids of small rows would take as much memory as the rows
    constexpr std::uint64_t max_ids = 64 << 10;
    const std::uint64_t count = source_->row_count();
    const std::uint64_t source_row_bytes = source_->row_size_bytes();
    std::chrono::nanoseconds waited{};
    std::vector<std::uint64_t> ids(static_cast<std::size_t>(std::min(count, max_ids)));
    for (std::uint64_t first = 0; first < count; first += ids.size()) {
        ids.resize(static_cast<std::size_t>(std::min(count - first, max_ids)));
        std::iota(ids.begin(), ids.end(), first);
        waited += source_->read_rows(
            ids, destination.subspan(first * source_row_bytes, ids.size() * source_row_bytes));
    }
    return waited;
}

}  // namespace

source_pointer detail::one_row_of(source_pointer source) {
    return std::make_shared<const whole_source>(std::move(source));
}

source_pointer detail::stack_rows(std::vector<source_pointer> rows) {
    if (rows.empty()) throw invalid_argument("cannot stack an empty list of sources");
    const row_source& first = *rows.front();
    for (const source_pointer& row : rows) {
        if (row->dtype() == first.dtype() && row->row_shape() == first.row_shape()) continue;
        throw invalid_argument(
            fmt::format("{} and {} cannot be stacked: the first is {} of shape {}, the second {} of shape {}",
                        first.description(), row->description(), first.dtype().descr(),
                        to_string(first.row_shape()), row->dtype().descr(), to_string(row->row_shape())));
    }
    return concatenate(std::move(rows));
}

source_pointer stack(std::vector<source_pointer> sources) {
    if (std::ranges::find(sources, nullptr) != sources.end()) {
        throw invalid_argument("one of the sources to be stacked is null");
    }
    for (source_pointer& source : sources)
        source = detail::one_row_of(std::move(source));
    return detail::stack_rows(std::move(sources));
}

}  // namespace pinflow
