#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/listing.hpp"
#include "pinflow/formats/open.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/source_check.hpp"
#include "src/shared/publish.hpp"

namespace pinflow {

namespace {

using namespace detail;

/// The content of a row source, which it keeps alive.
class owned_rows final : public segment_content {
 public:
    explicit owned_rows(std::shared_ptr<const row_source> rows)
        : rows_(std::move(rows)), content_(content_of(*rows_)) {}
    const pinflow::dtype& dtype() const noexcept override { return content_->dtype(); }
    shape_vector shape() const override { return content_->shape(); }
    std::string copy(const copy_target& to) override { return content_->copy(to); }

 private:
    std::shared_ptr<const row_source> rows_;
    std::unique_ptr<segment_content> content_;
};

std::unique_ptr<segment_content> rows_content(const std::string& text, const open_options& options = {}) {
    auto rows = open_rows(text, options);
    check_row_source(*rows);
    return std::make_unique<owned_rows>(std::move(rows));
}

/// Memory for reordering and decoding.
std::uint64_t stream_memory_bytes() {
    constexpr std::uint64_t usual_bytes = std::uint64_t{64} << 20;
    return std::min(usual_bytes, read_available_memory().size_bytes / 4);
}

std::unique_ptr<segment_content> elements_content(const std::string& path, const std::string& name) {
    return content_of(open_elements(path)->stream(name, stream_memory_bytes()));
}

/// A small array of an open file. It is opened when it is copied, and copied by one thread: a file may have
/// more of them than the process may have descriptors.
class small_array final : public segment_content {
 public:
    static constexpr std::uint64_t max_bytes = std::uint64_t{4} << 20;

    small_array(std::shared_ptr<const element_file> file, std::string path, const array_listing& listed)
        : file_(std::move(file)),
          path_(std::move(path)),
          name_(listed.name),
          dtype_(*listed.dtype),
          shape_(listed.shape) {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    shape_vector shape() const override { return shape_; }
    std::string copy(const copy_target& to) override {
        auto stream = file_->stream(name_, stream_memory_bytes());
        if (!(stream->dtype() == dtype_) || stream->shape() != shape_)
            throw data_changed(fmt::format("'{}' has changed since its arrays were listed", path_));
        return content_of(std::move(stream))->copy(to);
    }

 private:
    std::shared_ptr<const element_file> file_;
    std::string path_;
    std::string name_;
    pinflow::dtype dtype_;
    shape_vector shape_;
};

/// A stored member of a .npz file: its rows are copied by all cores. Then it is read once more, to check its
/// CRC-32.
class stored_member final : public segment_content {
 public:
    stored_member(std::unique_ptr<segment_content> rows, std::unique_ptr<element_stream> elements)
        : rows_(std::move(rows)), elements_(std::move(elements)) {}
    const pinflow::dtype& dtype() const noexcept override { return rows_->dtype(); }
    shape_vector shape() const override { return rows_->shape(); }
    std::string copy(const copy_target& to) override {
        std::string checksum = rows_->copy(to);
        elements_->finish();
        return checksum;
    }

 private:
    std::unique_ptr<segment_content> rows_;
    std::unique_ptr<element_stream> elements_;
};

/// How an array of a file is copied.
enum class copy_way : std::uint8_t {
    rows,      ///< by all cores
    stored,    ///< as stored_member
    elements,  ///< one after the other
};

copy_way way_of(file_format format, const array_listing& listed) {
    if (format != file_format::npz || !listed.dtype) return copy_way::rows;
    // as rows, a compressed member would be inflated to other memory first
    return listed.mappable ? copy_way::stored : copy_way::elements;
}

/// @param name empty for the only array of a file.
std::unique_ptr<segment_content> array_content(const std::string& path, const std::string& name,
                                               copy_way way) {
    if (way == copy_way::elements) return elements_content(path, name);
    try {
        auto rows = rows_content(name.empty() ? path : path + ":" + name);
        if (way == copy_way::rows) return rows;
        return std::make_unique<stored_member>(std::move(rows),
                                               open_elements(path)->stream(name, stream_memory_bytes()));
    } catch (const unsupported&) {
        // it may have no axes, or be in Fortran order
        return elements_content(path, name);
    }
}

/// The content of the array NAME of a file. Lists the members of a .npz file, to see how this one is stored.
std::unique_ptr<segment_content> named_array_content(const std::string& path, std::string name) {
    if (format_of(path) != file_format::npz) return array_content(path, name, copy_way::rows);
    if (name.ends_with(".npy")) name.resize(name.size() - 4);
    const std::vector<array_listing> listed = list_arrays(path);
    const auto found = std::ranges::find_if(
        listed, [&](const array_listing& each) { return each.name == name || each.name == name + ".npy"; });
    return array_content(path, name,
                         found == listed.end() ? copy_way::rows : way_of(file_format::npz, *found));
}

}  // namespace

std::vector<segment_info> publish_file(std::string_view name, const std::string& file,
                                       const publish_options& options) {
    if (is_pattern(file))
        return {publish_content(name, *rows_content(file, {.stack = options.stack}), options)};
    const file_and_name split = split_file_and_name(file);
    if (split.named) return {publish_content(name, *named_array_content(split.path, split.name), options)};
    const file_format format = format_of(split.path);
    const std::vector<array_listing> listed = list_arrays(split.path);
    if (listed.empty()) throw invalid_argument(fmt::format("cannot publish '{}': it has no arrays", file));
    if (listed.size() == 1)
        return {publish_content(
            name, *array_content(split.path, listed.front().name, way_of(format, listed.front())), options)};
    std::vector<named_content> arrays;
    const std::shared_ptr<const element_file> opened = open_elements(split.path);
    for (const array_listing& each : listed) {
        if (!each.dtype)
            throw unsupported(fmt::format("cannot publish '{}:{}': {}; choose arrays as '{}:NAME'",
                                          split.path, each.name, each.reason, split.path));
        const bool is_small = each.size_bytes <= small_array::max_bytes && each.dtype->is_little_endian();
        std::unique_ptr<segment_content> content;
        if (is_small) {
            content = std::make_unique<small_array>(opened, split.path, each);
        } else {
            content = array_content(split.path, each.name, way_of(format, each));
        }
        arrays.emplace_back(each.name, std::move(content));
    }
    return publish_contents(name, arrays, options);
}

}  // namespace pinflow
