#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/checked.hpp"

namespace pinflow {

namespace {

using source_pointer = std::shared_ptr<const row_source>;

class concatenated_rows final : public row_source {
 public:
    explicit concatenated_rows(std::vector<source_pointer> sources);

    const pinflow::dtype& dtype() const noexcept override { return sources_.front()->dtype(); }
    const shape_vector& row_shape() const noexcept override { return sources_.front()->row_shape(); }
    std::uint64_t row_count() const noexcept override { return ends_.back(); }
    std::uint64_t row_size_bytes() const noexcept override { return sources_.front()->row_size_bytes(); }

    std::string description() const override {
        return fmt::format("{} to {} ({} sources)", sources_.front()->description(),
                           sources_.back()->description(), sources_.size());
    }

    std::span<const row_extent> extents() const noexcept override { return extents_; }
    std::string why_no_extents() const override;
    std::uint64_t memory_bytes() const noexcept override {
        std::uint64_t most = 0;  // which they share
        for (const source_pointer& source : sources_)
            most = std::max(most, source->memory_bytes());
        return most;
    }

    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override;

    void check_unchanged() const override {
        for (const source_pointer& source : sources_)
            source->check_unchanged();
    }

 private:
    void check_alike() const;
    void add_extents();

    std::uint64_t begin_of(std::size_t index) const noexcept { return index == 0 ? 0 : ends_[index - 1]; }
    /// The source that holds the row `id`.
    std::size_t source_of(std::uint64_t id) const noexcept {
        return static_cast<std::size_t>(std::ranges::upper_bound(ends_, id) - ends_.begin());
    }

    std::vector<source_pointer> sources_;
    std::vector<std::uint64_t> ends_;  // of each source's rows, in numbers of the whole
    std::vector<row_extent> extents_;
};

concatenated_rows::concatenated_rows(std::vector<source_pointer> sources) : sources_(std::move(sources)) {
    check_alike();
    std::uint64_t end = 0;
    for (const source_pointer& source : sources_) {
        if (!detail::add(end, source->row_count(), end)) {
            throw invalid_argument(fmt::format("{} have more than 2^64 rows together: {} alone has {}",
                                               description(), source->description(), source->row_count()));
        }
        ends_.push_back(end);
    }
    add_extents();
}

void concatenated_rows::check_alike() const {
    const row_source& first = *sources_.front();
    for (const source_pointer& source : sources_) {
        if (source->dtype() == first.dtype() && source->row_shape() == first.row_shape()) continue;
        throw invalid_argument(fmt::format(
            "the rows of {} and {} cannot follow each other: those of the first are {} of shape "
            "{}, those of the second {} of shape {}",
            first.description(), source->description(), first.dtype().descr(), to_string(first.row_shape()),
            source->dtype().descr(), to_string(source->row_shape())));
    }
}

void concatenated_rows::add_extents() {
    for (const source_pointer& source : sources_) {
        const auto extents = source->extents();
        if (extents.empty() && source->row_count() > 0) return extents_.clear();
        extents_.insert(extents_.end(), extents.begin(), extents.end());
    }
}

std::string concatenated_rows::why_no_extents() const {
    for (const source_pointer& source : sources_) {
        if (source->row_count() == 0 || !source->extents().empty()) continue;
        const std::string why = source->why_no_extents();
        return why.empty() ? why
                           : fmt::format("cannot be taken in place, since {} {}", source->description(), why);
    }
    return {};
}

std::chrono::nanoseconds concatenated_rows::read_rows(std::span<const std::uint64_t> ids,
                                                      std::span<std::byte> destination) const {
    for (const std::uint64_t id : ids) {
        if (id >= row_count()) {
            throw invalid_argument(
                fmt::format("row {} was asked of {}, which have {}", id, description(), row_count()));
        }
    }
    const std::uint64_t row_bytes = row_size_bytes();
    std::uint64_t size_bytes = 0;
    if (!detail::multiply(ids.size(), row_bytes, size_bytes) || destination.size() != size_bytes) {
        throw invalid_argument(fmt::format("{} rows of {} bytes do not make {} bytes", ids.size(), row_bytes,
                                           destination.size()));
    }
    std::chrono::nanoseconds waited{};
    std::vector<std::uint64_t> ids_within;
    for (std::size_t first = 0; first < ids.size(); first += ids_within.size()) {
        // ids that follow each other are one call for as long as they stay in one source
        const std::size_t index = source_of(ids[first]);
        const std::uint64_t begin = begin_of(index);
        ids_within.clear();
        for (const std::uint64_t id : ids.subspan(first)) {
            if (id < begin || id >= ends_[index]) break;
            ids_within.push_back(id - begin);
        }
        waited += sources_[index]->read_rows(
            ids_within, destination.subspan(first * row_bytes, ids_within.size() * row_bytes));
    }
    return waited;
}

}  // namespace

std::shared_ptr<const row_source> concatenate(std::vector<source_pointer> sources) {
    if (sources.empty()) throw invalid_argument("no sources were given whose rows could follow each other");
    if (std::ranges::find(sources, nullptr) != sources.end()) {
        throw invalid_argument("one of the sources whose rows are to follow each other is null");
    }
    if (sources.size() == 1) return sources.front();
    return std::make_shared<const concatenated_rows>(std::move(sources));
}

}  // namespace pinflow
