#include "src/python/native/opened_array.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/listing.hpp"
#include "pinflow/formats/open.hpp"
#include "src/core/checked.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/stack.hpp"

namespace pinflow::python {

namespace {

/// The entry of an array in the list of a file; the only one if `name` is empty.
std::optional<array_listing> listing_of(const std::string& path, const std::string& name) {
    if (!name.empty() && format_of(path) == file_format::hdf5) {
        // the list of all datasets takes long; if the name is missing, `open` in of_name throws the error
        try {
            return list_hdf5(path, name);
        } catch (const invalid_argument&) {
            return std::nullopt;
        }
    }
    std::vector<array_listing> listed = list_arrays(path);
    if (name.empty()) {
        if (listed.size() == 1) return std::move(listed.front());
        return std::nullopt;
    }
    const auto found = std::ranges::find_if(
        listed, [&](const array_listing& each) { return each.name == name || each.name == name + ".npy"; });
    if (found == listed.end()) return std::nullopt;
    return std::move(*found);
}

/// All rows of a source, gathered into memory.
array gathered(const row_source& rows, const dtype& type, const shape_vector& shape) {
    const std::uint64_t size_bytes = detail::saturated(rows.row_count(), rows.row_size_bytes());
    detail::require_memory(size_bytes,
                           fmt::format("cannot bring all elements of {} into memory: they take {} bytes",
                                       rows.description(), size_bytes),
                           "use some of its rows at a time");
    auto memory = memory_region::anonymous(size_bytes);
    constexpr std::uint64_t rows_at_once = 1 << 16;
    std::vector<std::uint64_t> ids;
    for (std::uint64_t first = 0; first < rows.row_count(); first += rows_at_once) {
        ids.resize(std::min(rows_at_once, rows.row_count() - first));
        std::iota(ids.begin(), ids.end(), first);
        rows.read_rows(
            ids, memory.bytes().subspan(first * rows.row_size_bytes(), ids.size() * rows.row_size_bytes()));
    }
    return {std::move(memory), type, shape};
}

}  // namespace

std::shared_ptr<opened_array> opened_array::open(const std::string& text, bool stack) {
    if (is_pattern(text)) return of_rows(open_rows(text, {.stack = stack}));
    const file_and_name split = split_file_and_name(text);
    return of_name(split.path, split.name);
}

std::shared_ptr<opened_array> opened_array::of_name(const std::string& path, const std::string& name) {
    const std::optional<array_listing> listed = listing_of(path, name);
    // `open` maps an array, and throws the error if it does not exist or cannot be opened
    if (!listed || !listed->dtype || listed->mappable)
        return of_array(name.empty() ? pinflow::open(path) : pinflow::open(path, name));
    const std::shared_ptr<opened_array> made(new opened_array(*listed->dtype));
    made->shape_ = listed->shape;
    made->reason_ = listed->reason;
    made->label_ = name.empty() ? path : path + ":" + listed->name;
    made->path_ = path;
    std::error_code no_folder;
    made->absolute_path_ = std::filesystem::absolute(path, no_folder);
    if (no_folder) made->absolute_path_ = path;
    const file_format format = format_of(path);
    made->has_boxes_ = format == file_format::hdf5;
    made->identity_ = input_file(path).identity();
    made->name_ = name;
    made->listed_name_ = listed->name;
    // a member of a .npz archive can be decoded only as a whole, so its rows are those of the decoded
    // elements
    if (format == file_format::npz) return made;
    try {
        made->rows_ = open_rows(made->label_);
    } catch (const unsupported& failure) {
        made->no_rows_reason_ = failure.what();
    }
    return made;
}

std::shared_ptr<opened_array> opened_array::of_rows(std::shared_ptr<const row_source> rows) {
    const std::shared_ptr<opened_array> made(new opened_array(rows->dtype()));
    made->shape_ = rows->row_shape();
    made->shape_.insert(made->shape_.begin(), rows->row_count());
    made->reason_ = "its rows are read or copied when they are asked for";
    made->label_ = rows->description();
    made->rows_ = std::move(rows);
    return made;
}

std::shared_ptr<opened_array> opened_array::of_array(array elements) {
    if (!elements.has_view()) {
        auto made = of_rows(elements.rows());
        made->reason_ = elements.reason();
        return made;
    }
    const std::shared_ptr<opened_array> made(new opened_array(elements.dtype()));
    made->shape_ = elements.shape();
    made->reason_ = elements.reason();
    made->label_ = elements.label();
    try {
        made->rows_ = elements.rows();
    } catch (const unsupported& failure) {
        made->no_rows_reason_ = failure.what();
    }
    made->elements_ = std::move(elements);
    return made;
}

std::shared_ptr<const row_source> opened_array::rows() const {
    if (rows_) return rows_;
    if (!no_rows_reason_.empty()) throw unsupported(no_rows_reason_);
    return elements().rows();
}

std::shared_ptr<const row_source> opened_array::as_one_row() const {
    return shape_.empty() ? detail::one_row_of(elements()) : detail::one_row_of(rows());
}

const array& opened_array::elements() const {
    if (elements_) return *elements_;
    const std::lock_guard lock(mutex_);
    if (!decoded_) {
        if (path_.empty()) {
            decoded_ = gathered(*rows_, type_, shape_);
        } else {
            array decoded =
                name_.empty() ? pinflow::open(absolute_path_) : pinflow::open(absolute_path_, name_);
            check_same(decoded.dtype(), decoded.shape());
            decoded_ = std::move(decoded);
        }
    }
    return *decoded_;
}

std::shared_ptr<opened_array> opened_array::sliding_windows(std::uint64_t length, std::uint64_t step) const {
    if (!elements_ && path_.empty()) {
        throw unsupported(
            fmt::format("cannot make sliding windows of {}: it has several parts, or its rows are read when "
                        "they are needed. Make the windows of each part, and concatenate them",
                        label_));
    }
    return of_array(elements().sliding_windows(length, step));
}

void opened_array::check_same(const dtype& type, const shape_vector& shape) const {
    if (input_file(absolute_path_).identity() == identity_ && type == type_ && shape == shape_) return;
    throw data_changed(fmt::format("'{}' has been changed or replaced since it was opened", path_));
}

/// A stream of the dataset. Null if the file cannot be opened or decoded, or has changed.
std::unique_ptr<detail::element_stream> opened_array::stream_of_part() const {
    constexpr std::uint64_t memory_bytes = std::uint64_t{16} << 20;
    try {
        const detail::element_file* stored = nullptr;
        {
            const std::lock_guard lock(stored_mutex_);
            if (!stored_) {
                auto opened = detail::open_hdf5_elements(absolute_path_);
                check_same(type_, opened->stream_of_part(listed_name_, memory_bytes)->shape());
                stored_ = std::move(opened);
            }
            stored = stored_.get();
        }
        return stored->stream_of_part(listed_name_, memory_bytes);
    } catch (const error&) {
        return nullptr;  // reading the rows throws the error, if it concerns them
    }
}

bool opened_array::read_box(const shape_vector& first, const shape_vector& lengths,
                            std::span<std::byte> destination) const {
    const std::unique_ptr<detail::element_stream> stream = stream_of_part();
    if (!stream) return false;
    for (std::size_t axis = shape_.size(); axis-- > 0;) {
        if (!stream->select(axis, first[axis], first[axis] + lengths[axis])) return false;
    }
    stream->read(destination);
    stream->finish();
    return true;
}

}  // namespace pinflow::python
