#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/source_check.hpp"
#include "src/core/stack.hpp"
#include "src/core/strided_reader.hpp"
#include "src/core/swap_plan.hpp"

namespace pinflow {

namespace {

std::string describe(const array& source) {
    const std::string label = source.label();
    return label.empty() ? "an array in memory" : fmt::format("'{}'", label);
}

/// The rows of one array, or the whole array as one row. There is one extent if the rows are stored as
/// delivered, contiguous or strided.
class array_rows final : public row_source {
 public:
    /// The last `row_axes` axes are the axes of a row; at most one other axis is allowed.
    array_rows(array source, detail::strided_reader reader, std::size_t row_axes)
        : array_(std::move(source)),
          dtype_(array_.dtype().little_endian()),
          row_shape_(array_.shape().end() - static_cast<std::ptrdiff_t>(row_axes), array_.shape().end()),
          row_count_(row_axes == array_.shape().size() ? 1 : array_.shape().front()),
          row_size_bytes_(element_count(row_shape_) * dtype_.size_bytes()),
          swap_(array_.dtype()),
          reader_(std::move(reader)),
          has_extent_(swap_.empty() && has_whole_rows()),
          extent_{array_.file(), array_.offset_bytes(), row_count_,
                  array_.has_view() ? array_.view().data() : nullptr, stride_bytes()} {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept override { return row_size_bytes_; }

    std::string description() const override { return describe(array_); }

    std::span<const row_extent> extents() const noexcept override {
        return {&extent_, has_extent_ ? std::size_t{1} : 0};
    }

    std::string no_extents_reason() const override {
        if (!reader_.in_order())
            return "is in Fortran order, so its elements are reordered when they are read";
        if (!has_whole_rows())
            return "has gaps within its rows, as some fields of structured arrays and their windows do";
        if (!swap_.empty()) return "is big-endian, so its rows are converted when they are read";
        return {};
    }

    bool file_backed() const noexcept override { return array_.file() != nullptr; }

    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override;

    void check_unchanged() const override {
        if (array_.file()) array_.file()->check_unchanged();
    }

 private:
    /// Whether all elements are contiguous.
    bool is_packed() const noexcept {
        return array_.size_bytes() == reader_.unit_bytes() || array_.size_bytes() == 0;
    }
    /// As in row_extent.
    std::uint64_t stride_bytes() const noexcept {
        return is_packed() || row_count_ <= 1 ? 0
                                              : static_cast<std::uint64_t>(array_.strides_bytes().front());
    }
    /// Whether each row is contiguous.
    bool has_whole_rows() const noexcept { return is_packed() || reader_.unit_bytes() == row_size_bytes_; }

    array array_;
    pinflow::dtype dtype_;
    shape_vector row_shape_;
    std::uint64_t row_count_;
    std::uint64_t row_size_bytes_;
    detail::swap_plan swap_;
    detail::strided_reader reader_;
    bool has_extent_;
    row_extent extent_;
};

std::chrono::nanoseconds array_rows::read_rows(std::span<const std::uint64_t> ids,
                                               std::span<std::byte> destination) const {
    detail::check_row_request(*this, ids, destination);
    std::chrono::nanoseconds waited{};
    detail::scratch_memory scratch;
    for (std::size_t first = 0; first < ids.size();) {
        // consecutive rows are one piece
        std::size_t last = first + 1;
        while (last < ids.size() && ids[last] == ids[last - 1] + 1)
            ++last;
        waited += reader_.read(ids[first] * row_size_bytes_,
                               destination.subspan(first * row_size_bytes_, (last - first) * row_size_bytes_),
                               scratch);
        first = last;
    }
    swap_.apply(destination);
    return waited;
}

}  // namespace

std::shared_ptr<const row_source> array::rows() const {
    const std::string name = describe(*this);
    if (!has_view() && !file()) throw invalid_argument("a moved-from array has no rows");
    if (shape().empty()) {
        throw unsupported(fmt::format("{} has no axes, so it has no rows", name));
    }
    detail::strided_reader reader(*this);
    if (!reader.in_order()) {
        throw unsupported(fmt::format(
            "{} has shape {} in Fortran order, so its rows are not contiguous: store it in C order", name,
            to_string(shape())));
    }
    return std::make_shared<const array_rows>(*this, std::move(reader), shape().size() - 1);
}

std::shared_ptr<const row_source> detail::one_row_of(const array& source) {
    return std::make_shared<const array_rows>(source, strided_reader(source), source.shape().size());
}

}  // namespace pinflow
