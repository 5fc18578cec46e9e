#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/checked.hpp"

namespace pinflow {

namespace {

/// The rows of one array whose rows follow each other: the one-extent case of a row source.
class array_rows final : public row_source {
 public:
    explicit array_rows(array source)
        : array_(std::move(source)),
          dtype_(array_.dtype().little_endian()),
          row_shape_(array_.shape().begin() + 1, array_.shape().end()),
          row_count_(array_.shape()[0]),
          row_size_bytes_(element_count(row_shape_) * dtype_.size_bytes()),
          swap_size_bytes_(array_.dtype() == dtype_ ? 1 : dtype_.swap_size_bytes()),
          data_(array_.mapped() ? array_.view().data() : nullptr),
          extent_{array_.file(), array_.offset_bytes(), row_count_, data_} {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept override { return row_size_bytes_; }

    std::string description() const override {
        return array_.file() ? fmt::format("'{}'", array_.file()->path()) : "an array in memory";
    }

    std::span<const row_extent> extents() const noexcept override {
        if (swap_size_bytes_ != 1) return {};  // the rows do not lie there as they are delivered
        return {&extent_, 1};
    }

    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override;

    void check_unchanged() const override {
        if (array_.file()) array_.file()->check_unchanged();
    }

 private:
    void swap_bytes(std::span<std::byte> bytes) const noexcept;

    array array_;
    pinflow::dtype dtype_;
    shape_vector row_shape_;
    std::uint64_t row_count_;
    std::uint64_t row_size_bytes_;
    std::uint64_t swap_size_bytes_;
    const std::byte* data_;
    row_extent extent_;
};

std::chrono::nanoseconds array_rows::read_rows(std::span<const std::uint64_t> ids,
                                               std::span<std::byte> destination) const {
    for (const std::uint64_t id : ids) {
        if (id >= row_count_) {
            throw invalid_argument(
                fmt::format("row {} was asked of {}, which has {}", id, description(), row_count_));
        }
    }
    std::uint64_t size_bytes = 0;
    if (!detail::multiply(ids.size(), row_size_bytes_, size_bytes) || destination.size() != size_bytes) {
        throw invalid_argument(fmt::format("{} rows of {} bytes do not make {} bytes", ids.size(),
                                           row_size_bytes_, destination.size()));
    }
    std::chrono::nanoseconds waited{};
    for (std::size_t first = 0; first < ids.size();) {
        // rows that follow each other are one piece
        std::size_t last = first + 1;
        while (last < ids.size() && ids[last] == ids[last - 1] + 1)
            ++last;
        const auto piece = destination.subspan(first * row_size_bytes_, (last - first) * row_size_bytes_);
        const std::uint64_t begin_bytes = ids[first] * row_size_bytes_;
        if (array_.file()) {
            waited += array_.file()->read(array_.offset_bytes() + begin_bytes, piece);
        } else if (!piece.empty()) {
            std::memcpy(piece.data(), data_ + begin_bytes, piece.size());
        }
        first = last;
    }
    if (swap_size_bytes_ != 1) swap_bytes(destination);
    return waited;
}

void array_rows::swap_bytes(std::span<std::byte> bytes) const noexcept {
    for (std::size_t offset = 0; offset < bytes.size(); offset += swap_size_bytes_) {
        const auto number = bytes.subspan(offset, swap_size_bytes_);
        std::reverse(number.begin(), number.end());
    }
}

}  // namespace

std::shared_ptr<const row_source> array::rows() const {
    const std::string name = file_ ? fmt::format("'{}'", file_->path()) : "an array in memory";
    if (shape().empty()) {
        throw unsupported(
            fmt::format("{} holds one element without axes, so that there are no rows to take", name));
    }
    if (!view_.c_contiguous()) {
        throw unsupported(fmt::format(
            "{} has shape {} in Fortran order, so that its rows do not lie together: store it in C order",
            name, to_string(shape())));
    }
    return std::make_shared<const array_rows>(*this);
}

}  // namespace pinflow
