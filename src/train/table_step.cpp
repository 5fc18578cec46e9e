#include "src/train/table_step.hpp"

#include <algorithm>
#include <array>

namespace pinflow::detail {

namespace {

/// The offset of the lists in the memory of a step. The numbers come first.
constexpr std::uint64_t lists_offset_bytes = 128;
static_assert(sizeof(step_numbers) <= lists_offset_bytes);

/// Bytes of the numbers and indices of a step: ids, groups, positions, starts.
std::uint64_t index_bytes(std::uint64_t max_ids) {
    return lists_offset_bytes + max_ids * 24 + 8;
}

}  // namespace

table_step::table_step(std::uint64_t max, const record_layout& layout, stream_view stream,
                       const std::shared_ptr<memory_resource>& resource)
    : max_ids(max),
      records(max * layout.size_bytes, stream, resource),
      indices(index_bytes(max), stream, resource),
      sums(max / frequent_gradients * layout.columns * sizeof(float), stream, resource),
      host(index_bytes(max) + max * sizeof(std::uint64_t), stream.device()),
      ids_ready(stream.device()),
      grouped(stream.device()),
      listed(stream.device()),
      gathered(stream.device()),
      ready(stream.device()),
      updated(stream.device()),
      written(stream.device()),
      released(stream.device()) {
    host_numbers() = {};
    newer.reserve(32);  // more than there are steps: no later call allocates
}

row_groups table_step::groups_at(std::byte* base) const noexcept {
    base += lists_offset_bytes;
    return {reinterpret_cast<std::uint64_t*>(base), reinterpret_cast<std::int64_t*>(base + max_ids * 8),
            reinterpret_cast<std::uint32_t*>(base + max_ids * 20),
            reinterpret_cast<std::uint32_t*>(base + max_ids * 16)};
}

void table_step::copy_requested(std::span<const std::uint64_t> ids) {
    auto* const to = reinterpret_cast<std::uint64_t*>(host.data() + index_bytes(max_ids));
    std::ranges::copy(ids, to);
    requested = {to, ids.size()};
}

void table_step::upload(stream_view stream) const {
    const row_groups from = host_groups();
    const row_groups to = device_groups();
    const auto range = [](auto* destination, const auto* source, std::uint64_t count) {
        return copy_range{reinterpret_cast<std::byte*>(destination),
                          reinterpret_cast<const std::byte*>(source), count * sizeof *source};
    };
    if (is_grouped_on_device) {
        copy_to_device_async(indices.data(), {host.data(), lists_offset_bytes}, stream);
        copy_to_device_async(reinterpret_cast<std::byte*>(to.ids), std::as_bytes(requested), stream);
        return;
    }
    // the ids come right after the numbers
    const std::array<copy_range, 4> ranges{
        copy_range{indices.data(), host.data(), lists_offset_bytes + row_count * sizeof *from.ids},
        range(to.groups, from.groups, position_count), range(to.starts, from.starts, row_count + 1),
        range(to.positions, from.positions, position_count)};
    copy_batch_to_device_async(ranges, stream);
}

void record_or_wait(event& passed, stream_view stream) {
    try {
        passed.record(stream);
    } catch (...) {
        stream.synchronize();  // if this fails, too, the device runs nothing any more
        throw;
    }
}

void record_or_wait_noexcept(event& passed, stream_view stream) noexcept {
    try {
        record_or_wait(passed, stream);
    } catch (...) {
        return;  // nothing that the event should mark is running
    }
}

}  // namespace pinflow::detail
