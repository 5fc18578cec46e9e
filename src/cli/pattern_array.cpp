#include "src/cli/pattern_array.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "formats/patterns.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow::cli {

namespace {

using pinflow::detail::element_stream;
using pinflow::detail::multiply;

std::uint64_t size_bytes_of(const array_listing& listing) {
    return element_count(listing.shape) * listing.dtype->size_bytes();
}

/// Reads the arrays of files one after the other. Only one file is open at a time.
class joined_elements final : public element_stream {
 public:
    joined_elements(std::vector<pattern_array::part> parts, shape_vector shape, std::uint64_t memory_bytes)
        : parts_(std::move(parts)),
          dtype_(parts_.front().listing.dtype->little_endian()),
          shape_(std::move(shape)),
          memory_bytes_(memory_bytes) {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& shape() const noexcept override { return shape_; }

    void read(std::span<std::byte> destination) override {
        while (!destination.empty()) {
            if (left_bytes_ == 0) {
                open_next();
                continue;
            }
            const std::uint64_t part_bytes = std::min<std::uint64_t>(left_bytes_, destination.size());
            open_->read(destination.first(part_bytes));
            destination = destination.subspan(part_bytes);
            left_bytes_ -= part_bytes;
            if (left_bytes_ == 0) open_->finish();
        }
    }

    /// Opens and checks the files without elements after the last element. `read` has finished all others.
    void finish() override {
        while (next_ < parts_.size())
            open_next();
    }

 private:
    /// Opens the next file, and finishes it if it has no elements.
    void open_next() {
        open_.reset();
        if (next_ == parts_.size())
            throw invalid_argument(fmt::format("cannot read past the last of {} files", parts_.size()));
        const pattern_array::part& part = parts_[next_++];
        open_ = pinflow::detail::open_elements(part.source.path)->stream(part.listing.name, memory_bytes_);
        if (open_->dtype() != dtype_ || open_->shape() != part.listing.shape) {
            throw data_changed(fmt::format("'{}' changed after its header was read", part.source.path));
        }
        left_bytes_ = size_bytes_of(part.listing);
        if (left_bytes_ == 0) open_->finish();
    }

    std::vector<pattern_array::part> parts_;
    pinflow::dtype dtype_;
    shape_vector shape_;
    std::uint64_t memory_bytes_;
    std::size_t next_ = 0;
    std::unique_ptr<element_stream> open_;
    std::uint64_t left_bytes_ = 0;  ///< of the open file
};

/// The part of a file's shape that all files must share.
std::span<const std::uint64_t> row_shape_of(const array_listing& listing, bool stacked) {
    return std::span<const std::uint64_t>(listing.shape).subspan(stacked ? 0 : 1);
}

void check_alike(const pattern_array::part& first, const pattern_array::part& other, bool stacked) {
    const array_listing& a = first.listing;
    const array_listing& b = other.listing;
    if (a.dtype->little_endian() == b.dtype->little_endian() &&
        std::ranges::equal(row_shape_of(a, stacked), row_shape_of(b, stacked))) {
        return;
    }
    throw invalid_argument(fmt::format(
        "'{}' and '{}' cannot form one array: the first is {} of shape {}, the second {} of shape {}",
        first.source.path, other.source.path, a.dtype->descr(), to_string(a.shape), b.dtype->descr(),
        to_string(b.shape)));
}

}  // namespace

pattern_array::pattern_array(const std::string& text, bool stacked) : stacked_(stacked) {
    auto [paths, name] = pinflow::detail::files_of_pattern(text);
    if (paths.empty()) throw invalid_argument(fmt::format("cannot open '{}': no file matches it", text));
    std::uint64_t row_count = 0;
    for (std::string& path : paths) {
        const file_format format = format_of(path);
        source_argument source{std::move(path), name, format, std::nullopt};
        array_listing listing = name ? find_array(source) : pinflow::detail::only_array(source.path);
        if (!listing.dtype)
            throw unsupported(fmt::format("cannot open '{}': {}", source.path, listing.reason));
        if (!stacked && listing.shape.empty()) {
            throw invalid_argument(
                fmt::format("the array of '{}' has no axes, so it has no rows that could follow others: with "
                            "--stack, each file is a row",
                            source.path));
        }
        parts_.push_back({std::move(source), std::move(listing)});
        check_alike(parts_.front(), parts_.back(), stacked);
        const std::uint64_t added = stacked ? 1 : parts_.back().listing.shape.front();
        if (!pinflow::detail::add(row_count, added, row_count)) {
            throw invalid_argument(fmt::format("the files that match '{}' have 2^64 rows or more", text));
        }
    }
    const auto row_shape = row_shape_of(parts_.front().listing, stacked);
    shape_ = {row_count};
    shape_.insert(shape_.end(), row_shape.begin(), row_shape.end());
    std::uint64_t size_bytes = parts_.front().listing.dtype->size_bytes();
    for (const std::uint64_t length : shape_) {
        if (!multiply(size_bytes, length, size_bytes)) {
            throw invalid_argument(fmt::format("the files that match '{}' have 2^64 bytes or more", text));
        }
    }
}

array_listing pattern_array::description() const {
    array_listing whole = parts_.front().listing;
    whole.name.clear();
    whole.dtype = whole.dtype->little_endian();
    whole.shape = shape_;
    whole.fortran_order = false;
    whole.offset_bytes.reset();
    whole.size_bytes = 0;
    std::uint64_t mappable = 0;
    std::string reason;  // of the first file that is not mapped
    for (const part& each : parts_) {
        const array_listing& listing = each.listing;
        const bool is_scattered = has_scattered_rows(listing);
        whole.fortran_order = whole.fortran_order || (is_scattered && !stacked_);
        whole.size_bytes += listing.size_bytes;
        std::string own = !listing.mappable                    ? listing.reason
                          : !listing.dtype->is_little_endian() ? "it is big-endian and has to be converted"
                          : is_scattered && stacked_ ? "it is in Fortran order and has to be reordered"
                                                     : "";
        mappable += own.empty() ? 1U : 0U;
        if (reason.empty() && !own.empty()) reason = fmt::format("'{}': {}", each.source.path, own);
    }
    whole.mappable = reason.empty();
    whole.reason = whole.mappable
                       ? "each file is mapped"
                       : fmt::format("{} of {} files are mapped; {}", mappable, parts_.size(), reason);
    return whole;
}

std::unique_ptr<element_stream> pattern_array::stream(std::string_view /*name*/,
                                                      std::uint64_t memory_bytes) const {
    return std::make_unique<joined_elements>(parts_, shape_, memory_bytes);
}

}  // namespace pinflow::cli
