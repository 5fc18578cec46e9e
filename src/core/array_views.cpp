#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "src/core/mapping_reason.hpp"
#include "src/core/quote.hpp"

/// Views of an array's bytes: as another type, of one field, as sliding windows.
namespace pinflow {

namespace {

bool is_packed(const array_view& view) {
    return view.c_contiguous() || view.fortran_contiguous();
}

}  // namespace

array array::view_as(const pinflow::dtype& type) const {
    if (type.size_bytes() != dtype().size_bytes()) {
        throw invalid_argument(
            fmt::format("cannot view an array of {} as {}: its elements have {} bytes, not {}",
                        dtype().descr(), type.descr(), dtype().size_bytes(), type.size_bytes()));
    }
    array result = *this;
    result.view_ = array_view(view_.data(), type, shape(), strides_bytes());
    // another type may need another alignment
    if (file_ && has_view_ && is_packed(view_)) {
        result.reason_ = detail::mapping_reason(type, offset_bytes_, size_bytes());
    }
    return result;
}

namespace {

/// The field of `type` whose name is `name`, or the part of `name` before a dot; null if there is none.
const dtype_field* find_field(const dtype& type, std::string_view name) {
    for (std::size_t end = name.size(); end != 0 && end != name.npos; end = name.rfind('.', end - 1)) {
        const auto field = std::ranges::find(type.fields(), name.substr(0, end), &dtype_field::name);
        if (field != type.fields().end()) return &*field;
    }
    return nullptr;
}

/// The names of the fields: "'a', 'b', 'c'". At most 20, because a file can have any number of them.
std::string names_of(std::span<const dtype_field> fields) {
    constexpr std::size_t max_names = 20;
    std::string names;
    for (const dtype_field& field : fields.first(std::min(fields.size(), max_names))) {
        names += (names.empty() ? "" : ", ") + detail::quote(field.name);
    }
    return fields.size() > max_names ? fmt::format("{} and {} more", names, fields.size() - max_names)
                                     : names;
}

}  // namespace

array array::field(std::string_view name) const {
    const pinflow::dtype* type = &dtype();
    shape_vector shape = this->shape();
    std::vector<std::int64_t> strides = strides_bytes();
    std::uint64_t offset_bytes = 0;
    std::string_view rest = name;
    for (bool found = false; !found;) {
        const dtype_field* const field = find_field(*type, rest);
        if (field == nullptr) {
            throw invalid_argument(type->fields().empty()
                                       ? fmt::format("there is no field {}: elements of {} have no fields",
                                                     detail::quote(name), type->descr())
                                       : fmt::format("there is no field {} among {}", detail::quote(name),
                                                     names_of(type->fields())));
        }
        const auto inner_strides = c_strides_bytes(field->shape, field->type.size_bytes());
        shape.insert(shape.end(), field->shape.begin(), field->shape.end());
        strides.insert(strides.end(), inner_strides.begin(), inner_strides.end());
        offset_bytes += field->offset_bytes;
        type = &field->type;
        found = rest.size() == field->name.size();
        rest.remove_prefix(found ? rest.size() : field->name.size() + 1);
    }
    array result = *this;
    // without elements, there is no byte at the field's offset either
    const std::uint64_t moved_bytes = view_.size() > 0 ? offset_bytes : 0;
    const std::byte* const data = view_.data() ? view_.data() + moved_bytes : nullptr;
    result.view_ = array_view(data, *type, std::move(shape), std::move(strides));
    if (file_) result.offset_bytes_ = this->offset_bytes() + moved_bytes;
    if (!label_.empty()) {
        result.label_ = fmt::format("{}.{}", label_, detail::printable(name, detail::max_label_name));
    } else if (file_) {
        result.label_ = detail::array_label(file_->path(), name);
    }
    if (has_view_ && is_packed(view_) && !is_packed(result.view_)) {
        result.reason_ +=
            fmt::format(": a field of a structured array, one every {} bytes", dtype().size_bytes());
    }
    return result;
}

array array::sliding_windows(std::uint64_t length, std::uint64_t step) const {
    if (length == 0 || step == 0)
        throw invalid_argument(
            fmt::format("cannot make sliding windows of {} rows, one every {} rows: both must be at least 1",
                        length, step));
    if (shape().empty()) throw invalid_argument("an array without axes has no sliding windows");
    const std::uint64_t row_count = shape()[0];
    const std::uint64_t count = row_count < length ? 0 : (row_count - length) / step + 1;
    shape_vector shape = this->shape();
    std::vector<std::int64_t> strides = strides_bytes();
    // a single window needs no step, and multiplying it by the stride might overflow
    const std::uint64_t used_step = count > 1 ? step : std::min(length, row_count);
    shape[0] = length;
    shape.insert(shape.begin(), count);
    strides.insert(strides.begin(), static_cast<std::int64_t>(used_step) * strides[0]);
    array result = *this;
    result.view_ = array_view(view_.data(), dtype(), std::move(shape), std::move(strides));
    if (has_view_)
        result.reason_ += fmt::format(": sliding windows of {} rows, one every {} rows", length, step);
    return result;
}

}  // namespace pinflow
