#include "src/train/small_buffer.hpp"

#include <algorithm>
#include <cstring>

#include "src/core/checked.hpp"

namespace pinflow::detail {

namespace {

/// Every part begins at a multiple of this number of bytes.
constexpr std::uint64_t part_alignment = 256;

template <typename T>
void put(std::vector<std::byte>& contents, std::uint64_t offset_bytes, const std::vector<T>& values) {
    if (!values.empty())
        std::memcpy(contents.data() + offset_bytes, values.data(), values.size() * sizeof(T));
}

}  // namespace

small_buffer::small_buffer(const flat_layout& layout, std::span<const optimizer> groups)
    : segments_(layout.segments) {
    for (const optimizer& group : groups) {
        numbers_.push_back(numbers_of(group));
        tables_.add(group);
    }
    std::uint64_t end = 0;
    const auto reserve = [&](std::uint64_t size_bytes) {
        const std::uint64_t begin = end;
        end += rounded_up(size_bytes, part_alignment);
        return begin;
    };
    reserve(sizeof(flat_control));
    segments_bytes_ = reserve(segments_.size() * sizeof(flat_segment));
    numbers_bytes_ = reserve(numbers_.size() * sizeof(rule_numbers));
    tables_bytes_ = reserve(tables_.elements().size() * sizeof(double));
    const std::uint64_t packs = segments_.empty() ? 0 : segments_.back().end_pack;
    sums_bytes_ = reserve(norm_sum_count(packs) * sizeof(double));
    size_bytes_ = end;
}

std::vector<std::byte> small_buffer::contents(std::byte* base) const {
    std::vector<std::byte> contents(sums_bytes_);  // sums are written before they are read
    const flat_control control;
    std::memcpy(contents.data(), &control, sizeof control);
    put(contents, segments_bytes_, segments_);
    std::vector<rule_numbers> numbers = numbers_;
    const auto* const tables = reinterpret_cast<const double*>(base + tables_bytes_);
    for (std::size_t group = 0; group < numbers.size(); ++group)
        tables_.point(numbers[group], group, tables);
    put(contents, numbers_bytes_, numbers);
    put(contents, tables_bytes_, tables_.elements());
    return contents;
}

void small_buffer::point(flat_buffers& buffers, std::byte* base) const noexcept {
    buffers.control = reinterpret_cast<flat_control*>(base);
    buffers.segments = reinterpret_cast<const flat_segment*>(base + segments_bytes_);
    buffers.segment_count = static_cast<std::uint32_t>(segments_.size());
    buffers.groups = reinterpret_cast<const rule_numbers*>(base + numbers_bytes_);
    std::copy_n(segments_.begin(), std::min<std::size_t>(segments_.size(), flat_buffers::max_near_segments),
                buffers.near_segments);
    buffers.has_doubles =
        std::ranges::find(segments_, flat_type::float64, &flat_segment::type) != segments_.end();
    buffers.pack_count = segments_.empty() ? 0 : segments_.back().end_pack;
    buffers.sums = reinterpret_cast<double*>(base + sums_bytes_);
}

}  // namespace pinflow::detail
