#include "pinflow/array.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "pinflow/file.hpp"
#include "pinflow/mapped_file.hpp"
#include "src/core/checked.hpp"
#include "src/core/mapping_reason.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

std::string to_string(std::span<const std::uint64_t> shape) {
    return shape.size() == 1 ? fmt::format("({},)", shape[0]) : fmt::format("({})", fmt::join(shape, ", "));
}

namespace {

constexpr auto max_bytes = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

/// The product of `factor` and the lengths; empty if it is 2^64 or more. As in numpy, a length of 0 counts as
/// 1, so that the result does not depend on the order of the axes.
std::optional<std::uint64_t> extended_product(std::span<const std::uint64_t> shape, std::uint64_t factor) {
    for (const std::uint64_t length : shape) {
        if (length != 0 && !detail::multiply(factor, length, factor)) return std::nullopt;
    }
    return factor;
}

void check_fits_strides(std::span<const std::uint64_t> shape, std::uint64_t item_size_bytes) {
    if (!detail::fits_strides(shape, item_size_bytes)) {
        throw invalid_argument(fmt::format("an array of shape {} with elements of {} bytes is too large",
                                           to_string(shape), item_size_bytes));
    }
}

/// Strides without gaps. `axis_at(step)` is the axis at position `step`, from the fastest to the slowest.
template <typename Axes>
std::vector<std::int64_t> packed_strides(std::span<const std::uint64_t> shape, std::uint64_t item_size_bytes,
                                         Axes axis_at) {
    check_fits_strides(shape, item_size_bytes);
    std::vector<std::int64_t> strides(shape.size());
    std::uint64_t stride = item_size_bytes;
    for (std::size_t step = 0; step < shape.size(); ++step) {
        const std::size_t axis = axis_at(step);
        strides[axis] = static_cast<std::int64_t>(stride);
        // counting a length of 0 as 1 keeps the strides of the other axes useful
        stride *= std::max<std::uint64_t>(shape[axis], 1);
    }
    return strides;
}

bool is_packed(const array_view& view, const std::vector<std::int64_t>& packed) {
    if (view.size() < 2) return true;
    for (std::size_t axis = 0; axis < packed.size(); ++axis) {
        if (view.shape()[axis] > 1 && view.strides_bytes()[axis] != packed[axis]) return false;
    }
    return true;
}

/// The C++ type of an element; empty unless it is a little-endian bool, integer, float or double.
std::string cpp_name(const dtype& type) {
    const std::uint64_t bytes = type.size_bytes();
    if (type != type.little_endian()) return {};
    switch (type.kind()) {
        case dtype_kind::boolean:
            return "bool";
        case dtype_kind::signed_integer:
            return fmt::format("std::int{}_t", bytes * 8);
        case dtype_kind::unsigned_integer:
            return fmt::format("std::uint{}_t", bytes * 8);
        case dtype_kind::floating:
            return bytes == 4 ? "float" : bytes == 8 ? "double" : "";
        default:
            return {};
    }
}

}  // namespace

std::uint64_t element_count(std::span<const std::uint64_t> shape) {
    const auto count = extended_product(shape, 1);
    if (!count) {
        throw invalid_argument(fmt::format(
            "the shape {} is too large: its non-zero lengths multiply to 2^64 or more", to_string(shape)));
    }
    return std::ranges::find(shape, 0u) == shape.end() ? *count : 0;
}

std::vector<std::int64_t> c_strides_bytes(std::span<const std::uint64_t> shape,
                                          std::uint64_t item_size_bytes) {
    return packed_strides(shape, item_size_bytes, [&](std::size_t step) { return shape.size() - 1 - step; });
}

std::vector<std::int64_t> fortran_strides_bytes(std::span<const std::uint64_t> shape,
                                                std::uint64_t item_size_bytes) {
    return packed_strides(shape, item_size_bytes, [](std::size_t step) { return step; });
}

array_view::array_view(const std::byte* data, pinflow::dtype type, shape_vector shape)
    : data_(data),
      dtype_(std::move(type)),
      shape_(std::move(shape)),
      strides_bytes_(c_strides_bytes(shape_, dtype_.size_bytes())),
      size_(element_count(shape_)) {}

array_view::array_view(const std::byte* data, pinflow::dtype type, shape_vector shape,
                       std::vector<std::int64_t> strides_bytes)
    : data_(data),
      dtype_(std::move(type)),
      shape_(std::move(shape)),
      strides_bytes_(std::move(strides_bytes)),
      size_(element_count(shape_)) {
    if (strides_bytes_.size() != shape_.size()) {
        throw invalid_argument(fmt::format("a view of shape {} needs {} strides, not {}", to_string(shape_),
                                           shape_.size(), strides_bytes_.size()));
    }
    check_fits_strides(shape_, dtype_.size_bytes());  // with strides of 0, no memory bounds the size
}

bool array_view::c_contiguous() const {
    return is_packed(*this, c_strides_bytes(shape_, dtype_.size_bytes()));
}

bool array_view::fortran_contiguous() const {
    return is_packed(*this, fortran_strides_bytes(shape_, dtype_.size_bytes()));
}

void array_view::check_readable_as(const pinflow::dtype& type, std::size_t alignment) const {
    const auto refuse = [&](const std::string& reason) {
        throw invalid_argument(fmt::format("cannot read an array of {} and shape {} as {}: {}",
                                           dtype_.descr(), to_string(shape_), type.descr(), reason));
    };
    if (dtype_ != type) {
        if (dtype_.little_endian() == type) refuse("its byte order is not this machine's");
        const std::string cpp_type = cpp_name(dtype_);
        refuse(cpp_type.empty() ? "the types differ"
                                : fmt::format("the types differ; {} is {}", dtype_.descr(), cpp_type));
    }
    if (!c_contiguous()) refuse("its elements are not in C order");
    if (reinterpret_cast<std::uintptr_t>(data()) % alignment != 0) {
        refuse(fmt::format("its address is not a multiple of {}", alignment));
    }
}

array::array(array_view view, std::shared_ptr<const void> owner)
    : view_(std::move(view)), owner_(std::move(owner)) {}

array::array(memory_region memory, pinflow::dtype type, shape_vector shape)
    : view_(memory.data(), std::move(type), std::move(shape)), reason_("it lies in host memory") {
    if (memory.size_bytes() < view_.size_bytes()) {
        throw invalid_argument(fmt::format(
            "an array of {} and shape {} needs {} bytes, the memory given has {}", view_.dtype().descr(),
            to_string(view_.shape()), view_.size_bytes(), memory.size_bytes()));
    }
    owner_ = std::make_shared<const memory_region>(std::move(memory));
}

array array::of_memory(memory_region memory, pinflow::dtype type, shape_vector shape, bool fortran_order,
                       std::string reason) {
    auto strides = fortran_order ? fortran_strides_bytes(shape, type.size_bytes())
                                 : c_strides_bytes(shape, type.size_bytes());
    array result(std::move(memory), std::move(type), std::move(shape));
    result.view_ = array_view(result.view_.data(), result.dtype(), result.shape(), std::move(strides));
    result.reason_ = std::move(reason);
    return result;
}

array array::of_strided_memory(memory_region memory, pinflow::dtype type, shape_vector shape,
                               std::uint64_t stride_bytes) {
    if (shape.empty()) throw invalid_argument("a row stride needs an array with at least one axis");
    if (stride_bytes == 0 || stride_bytes > max_bytes)
        throw invalid_argument(fmt::format("a row stride has 1 to 2^63 - 1 bytes, not {}", stride_bytes));
    auto strides = c_strides_bytes(shape, type.size_bytes());
    const std::uint64_t row_bytes = element_count(std::span(shape).subspan(1)) * type.size_bytes();
    const std::uint64_t needed_bytes =
        shape[0] == 0 ? 0 : detail::saturated(shape[0] - 1, stride_bytes, row_bytes);
    if (memory.size_bytes() < needed_bytes) {
        throw invalid_argument(
            fmt::format("an array of {} and shape {} with a row stride of {} bytes needs {} bytes, the "
                        "memory given has {}",
                        type.descr(), to_string(shape), stride_bytes, needed_bytes, memory.size_bytes()));
    }
    strides[0] = static_cast<std::int64_t>(stride_bytes);
    array_view view(memory.data(), std::move(type), std::move(shape), std::move(strides));
    array result(std::move(view), std::make_shared<const memory_region>(std::move(memory)));
    result.reason_ = "it lies in host memory";
    return result;
}

namespace {

/// The size of an array in bytes.
/// @throws format_error if the file ends before the array's last byte; invalid_argument for a null pointer.
std::uint64_t size_bytes_within(const std::shared_ptr<const input_file>& opened, std::uint64_t offset_bytes,
                                const pinflow::dtype& type, const shape_vector& shape) {
    if (!opened) throw invalid_argument("cannot make an array of a null pointer to an input_file");
    const input_file& file = *opened;
    const std::uint64_t size_bytes = detail::fits_strides(shape, type.size_bytes())
                                         ? element_count(shape) * type.size_bytes()
                                         : max_bytes + 1;
    if (size_bytes > max_bytes || offset_bytes > file.size_bytes() ||
        size_bytes > file.size_bytes() - offset_bytes) {
        throw format_error(
            fmt::format("an array of {} and shape {} at offset {} does not fit into '{}', which has {} bytes",
                        type.descr(), to_string(shape), offset_bytes, file.path(), file.size_bytes()));
    }
    return size_bytes;
}

}  // namespace

array array::of_file(std::shared_ptr<const input_file> file, std::uint64_t offset_bytes, pinflow::dtype type,
                     shape_vector shape, bool fortran_order) {
    const std::uint64_t size_bytes = size_bytes_within(file, offset_bytes, type, shape);
    std::shared_ptr<const mapped_file> mapping;
    std::string reason = detail::mapping_shortage(size_bytes);
    if (reason.empty()) {
        reason = detail::mapping_reason(type, offset_bytes, size_bytes);
        try {
            mapping = std::make_shared<const mapped_file>(file, offset_bytes, size_bytes);
        } catch (const system_failure& failure) {
            reason = failure.what();
        }
    }
    return of_mapping(std::move(file), offset_bytes, std::move(type), std::move(shape), fortran_order,
                      std::move(mapping), std::move(reason));
}

array array::of_file_unmapped(std::shared_ptr<const input_file> file, std::uint64_t offset_bytes,
                              pinflow::dtype type, shape_vector shape, bool fortran_order) {
    static_cast<void>(size_bytes_within(file, offset_bytes, type, shape));
    return of_mapping(std::move(file), offset_bytes, std::move(type), std::move(shape), fortran_order,
                      nullptr, "it was opened without a mapping");
}

/// `mapping` is null if the file is not mapped.
array array::of_mapping(std::shared_ptr<const input_file> file, std::uint64_t offset_bytes,
                        pinflow::dtype type, shape_vector shape, bool fortran_order,
                        std::shared_ptr<const mapped_file> mapping, std::string reason) {
    auto strides = fortran_order ? fortran_strides_bytes(shape, type.size_bytes())
                                 : c_strides_bytes(shape, type.size_bytes());
    const std::byte* const data = mapping ? mapping->data() : nullptr;
    const bool mapped = mapping != nullptr;
    array result(array_view(data, std::move(type), std::move(shape), std::move(strides)), std::move(mapping));
    result.file_ = std::move(file);
    result.offset_bytes_ = offset_bytes;
    result.has_view_ = mapped;
    result.reason_ = std::move(reason);
    return result;
}

std::string array::label() const {
    return label_.empty() && file_ ? file_->path() : label_;
}

array array::labelled(std::string label) const {
    array result = *this;
    result.label_ = std::move(label);
    return result;
}

const array_view& array::view() const {
    if (!has_view_ && file_ == nullptr) throw invalid_argument("cannot view a moved-from array");
    if (!has_view_) {
        throw unsupported(
            fmt::format("the array in '{}' cannot be viewed in place: {}", file_->path(), reason_));
    }
    return view_;
}

}  // namespace pinflow
