#include "src/core/extent_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/checked.hpp"
#include "src/core/extent_stride.hpp"
#include "src/core/row_locator.hpp"
#include "src/core/source_check.hpp"

namespace pinflow::detail {

namespace {

using sources_view = std::span<const std::shared_ptr<const row_source>>;

class extent_rows final : public row_source {
 public:
    explicit extent_rows(sources_view sources)
        : dtype_(sources.front()->dtype()),
          row_shape_(sources.front()->row_shape()),
          row_size_bytes_(sources.front()->row_size_bytes()),
          description_(describe_sources(sources)) {
        add_extents(sources);
        mapping_ = map_extents(extents_, row_size_bytes_);
    }

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return locator_.row_count(); }
    std::uint64_t row_size_bytes() const noexcept override { return row_size_bytes_; }
    std::string description() const override { return description_; }
    std::span<const row_extent> extents() const noexcept override { return extents_; }
    bool file_backed() const noexcept override { return true; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override;
    void check_unchanged() const override {
        for (const auto& file : files_)
            file->check_unchanged();
        for (const auto& source : without_extents_)
            source->check_unchanged();
    }

 private:
    void add_extents(sources_view sources);
    void add_extent(const row_extent& extent);

    pinflow::dtype dtype_;
    shape_vector row_shape_;
    std::uint64_t row_size_bytes_;
    std::string description_;
    std::vector<row_extent> extents_;
    row_locator locator_;                                   // of extents
    std::vector<std::shared_ptr<const input_file>> files_;  // without repeats
    std::vector<std::shared_ptr<const row_source>>
        without_extents_;  // and without rows; only for check_unchanged
    side_by_side_mapping mapping_;
};

void extent_rows::add_extents(sources_view sources) {
    std::unordered_set<const input_file*> known_files;
    std::uint64_t row_count = 0;
    row_extent empty;
    for (const auto& source : sources) {
        if (!add(row_count, source->row_count(), row_count)) refuse_row_count(sources, *source);
        const auto extents = source->extents();
        if (extents.empty()) without_extents_.push_back(source);
        for (const row_extent& extent : extents) {
            if (extent.file && known_files.insert(extent.file.get()).second) files_.push_back(extent.file);
            if (extent.row_count > 0) {
                add_extent(extent);
            } else if (extent.file) {
                empty = extent;
            }
        }
    }
    // without any rows, one empty extent still names a file
    if (extents_.empty() && empty.file) extents_.push_back({empty.file, empty.offset_bytes, 0, nullptr});
    for (const row_extent& extent : extents_)
        static_cast<void>(locator_.add(extent.row_count));  // cannot overflow: the rows were counted before
}

void extent_rows::add_extent(const row_extent& extent) {
    if (!extents_.empty()) {
        row_extent& before = extents_.back();
        if (before.file == extent.file &&
            saturated(before.row_count, row_size_bytes_, before.offset_bytes) == extent.offset_bytes) {
            before.row_count += extent.row_count;
            return;
        }
    }
    extents_.push_back({extent.file, extent.offset_bytes, extent.row_count, nullptr});
}

std::chrono::nanoseconds extent_rows::read_rows(std::span<const std::uint64_t> ids,
                                                std::span<std::byte> destination) const {
    check_row_request(*this, ids, destination);
    std::chrono::nanoseconds waited{};
    std::size_t count = 0;
    for (std::size_t first = 0; first < ids.size(); first += count) {
        // consecutive rows in the file are one piece
        const auto [index, row] = locator_.find(ids[first]);
        const row_extent& extent = extents_[index];
        const std::uint64_t max_count = std::min<std::uint64_t>(ids.size() - first, extent.row_count - row);
        for (count = 1; count < max_count && ids[first + count] == ids[first] + count;)
            ++count;
        waited += extent.file->read(extent.offset_bytes + row * row_size_bytes_,
                                    destination.subspan(first * row_size_bytes_, count * row_size_bytes_));
    }
    return waited;
}

}  // namespace

side_by_side_mapping map_extents(std::span<row_extent> extents, std::uint64_t row_size_bytes) {
    std::vector<file_part> parts;
    std::vector<std::pair<std::size_t, std::size_t>> mapped;  // (extent, part that holds it)
    for (std::size_t index = 0; index < extents.size(); ++index) {
        const row_extent& extent = extents[index];
        if (!extent.file || extent.data != nullptr || extent.row_count == 0 || row_size_bytes == 0) continue;
        const std::uint64_t end_bytes = saturated(span_bytes(extent, row_size_bytes), 1, extent.offset_bytes);
        if (parts.empty() || parts.back().file != extent.file) {
            parts.push_back({extent.file, extent.offset_bytes, end_bytes});
        } else {  // chunks of one dataset, for example: the gaps take only addresses
            parts.back().begin_bytes = std::min(parts.back().begin_bytes, extent.offset_bytes);
            parts.back().end_bytes = std::max(parts.back().end_bytes, end_bytes);
        }
        mapped.emplace_back(index, parts.size() - 1);
    }
    side_by_side_mapping mapping(parts);
    for (const auto& [index, part] : mapped) {
        const std::byte* const begin = mapping.data(part);
        if (begin == nullptr) continue;
        extents[index].data = begin + (extents[index].offset_bytes - parts[part].begin_bytes);
    }
    return mapping;
}

bool lies_in_files(const row_source& source) {
    std::uint64_t row_count = 0;
    for (const row_extent& extent : source.extents()) {
        if (!extent.file && extent.row_count > 0) return false;
        row_count += extent.row_count;
    }
    return row_count == source.row_count();
}

std::shared_ptr<const row_source> make_extent_rows(sources_view sources) {
    return std::make_shared<const extent_rows>(sources);
}

std::string describe_sources(sources_view sources) {
    const std::string first = sources.front()->description(), last = sources.back()->description();
    const std::string names = first == last ? first : fmt::format("{} to {}", first, last);
    return fmt::format("{} ({} sources)", names, sources.size());
}

void refuse_row_count(sources_view sources, const row_source& last) {
    throw invalid_argument(fmt::format("{} have 2^64 rows or more together: {} alone has {}",
                                       describe_sources(sources), last.description(), last.row_count()));
}

}  // namespace pinflow::detail
