#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/extent_rows.hpp"
#include "src/core/extent_stride.hpp"
#include "src/core/row_locator.hpp"
#include "src/core/source_check.hpp"

namespace pinflow {

namespace {

using source_pointer = std::shared_ptr<const row_source>;

/// The rows of sources of which some are in memory, are not stored as delivered, or are strided.
class concatenated_rows final : public row_source {
 public:
    explicit concatenated_rows(std::vector<source_pointer> sources);

    const pinflow::dtype& dtype() const noexcept override { return sources_.front()->dtype(); }
    const shape_vector& row_shape() const noexcept override { return sources_.front()->row_shape(); }
    std::uint64_t row_count() const noexcept override { return locator_.row_count(); }
    std::uint64_t row_size_bytes() const noexcept override { return sources_.front()->row_size_bytes(); }
    std::string description() const override { return detail::describe_sources(sources_); }
    std::span<const row_extent> extents() const noexcept override { return extents_; }
    std::string no_extents_reason() const override;
    bool file_backed() const noexcept override {
        return std::ranges::all_of(sources_,
                                   [](const source_pointer& source) { return source->file_backed(); });
    }
    std::uint64_t memory_bytes() const noexcept override {
        // not the sum: sources that were opened by one call share their memory (see row_source::memory_bytes)
        std::uint64_t max_bytes = 0;
        for (const source_pointer& source : sources_)
            max_bytes = std::max(max_bytes, source->memory_bytes());
        return max_bytes;
    }

    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override;

    void check_unchanged() const override {
        for (const source_pointer& source : sources_)
            source->check_unchanged();
    }

 private:
    void add_extents();

    std::vector<source_pointer> sources_;
    detail::row_locator locator_;  // of sources
    std::vector<row_extent> extents_;
    detail::side_by_side_mapping mapping_;  // of extents that the sources have not mapped
};

concatenated_rows::concatenated_rows(std::vector<source_pointer> sources) : sources_(std::move(sources)) {
    for (const source_pointer& source : sources_) {
        if (!locator_.add(source->row_count())) detail::refuse_row_count(sources_, *source);
    }
    add_extents();
}

void concatenated_rows::add_extents() {
    for (const source_pointer& source : sources_) {
        const auto extents = source->extents();
        if (extents.empty() && source->row_count() > 0) return extents_.clear();
        extents_.insert(extents_.end(), extents.begin(), extents.end());
    }
    // empty sources must not divide rows that are in one piece
    if (row_count() > 0) std::erase_if(extents_, [](const row_extent& each) { return each.row_count == 0; });
    mapping_ = detail::map_extents(extents_, row_size_bytes());
}

std::string concatenated_rows::no_extents_reason() const {
    for (const source_pointer& source : sources_) {
        if (source->row_count() == 0 || !source->extents().empty()) continue;
        const std::string reason = source->no_extents_reason();
        return reason.empty()
                   ? reason
                   : fmt::format("cannot be taken in place, since {} {}", source->description(), reason);
    }
    return {};
}

std::chrono::nanoseconds concatenated_rows::read_rows(std::span<const std::uint64_t> ids,
                                                      std::span<std::byte> destination) const {
    detail::check_row_request(*this, ids, destination);
    const std::uint64_t row_bytes = row_size_bytes();
    std::chrono::nanoseconds waited{};
    std::vector<std::uint64_t> ids_within;
    for (std::size_t first = 0; first < ids.size(); first += ids_within.size()) {
        // neighbours in `ids` become one call as long as they are in one source
        const auto [index, row] = locator_.find(ids[first]);
        const std::uint64_t begin = ids[first] - row;
        const std::uint64_t row_count = sources_[index]->row_count();
        ids_within.clear();
        for (const std::uint64_t id : ids.subspan(first)) {
            if (id < begin || id - begin >= row_count) break;
            ids_within.push_back(id - begin);
        }
        waited += sources_[index]->read_rows(
            ids_within, destination.subspan(first * row_bytes, ids_within.size() * row_bytes));
    }
    return waited;
}

void check_alike(const std::vector<source_pointer>& sources) {
    const row_source& first = *sources.front();
    for (const source_pointer& source : sources) {
        if (source->dtype() == first.dtype() && source->row_shape() == first.row_shape()) continue;
        throw invalid_argument(fmt::format(
            "cannot concatenate {} and {}: rows of the first are {} of shape {}, rows of the second {} of "
            "shape {}",
            first.description(), source->description(), first.dtype().descr(), to_string(first.row_shape()),
            source->dtype().descr(), to_string(source->row_shape())));
    }
}

}  // namespace

std::shared_ptr<const row_source> concatenate(std::vector<source_pointer> sources) {
    if (sources.empty()) throw invalid_argument("cannot concatenate an empty list of sources");
    if (std::ranges::find(sources, nullptr) != sources.end()) {
        throw invalid_argument("one of the sources to concatenate is null");
    }
    if (sources.size() == 1) return sources.front();
    check_alike(sources);
    const bool keeps_sources = std::ranges::any_of(sources, [](const source_pointer& source) {
        return !detail::lies_in_files(*source) || !detail::has_contiguous_extents(*source);
    });
    if (!keeps_sources) return detail::make_extent_rows(sources);
    return std::make_shared<const concatenated_rows>(std::move(sources));
}

}  // namespace pinflow
