#include "src/train/device_grouper.hpp"

#include <limits>
#include <utility>

#include "src/core/checked.hpp"
#include "src/device/backend.hpp"

namespace pinflow::detail {

namespace {

constexpr sort_kernels kernels = sort_kernels::one;

std::uint64_t tiles_of(std::uint64_t ids) {
    return (ids + row_grouping::tile - 1) / row_grouping::tile;
}

}  // namespace

device_grouper::device_grouper(std::uint64_t max_ids, stream_view stream,
                               std::shared_ptr<memory_resource> resource)
    // for tables of any size: a table may grow
    : sort_bytes_(stream.device().backend().sort_scratch_bytes(
          max_ids, std::numeric_limits<std::uint64_t>::max(), kernels)),
      ids_bytes_(rounded_up(sort_bytes_, 256)),
      counts_bytes_(ids_bytes_ + max_ids * sizeof(std::uint64_t)),
      memory_(counts_bytes_ + tiles_of(max_ids) * sizeof(std::uint32_t), stream, std::move(resource)) {}

void device_grouper::group(const table_step& step, std::uint64_t row_count, std::uint64_t split_id,
                           stream_view stream) {
    device_backend& backend = stream.device().backend();
    const row_groups groups = step.device_groups();
    step_numbers& numbers = step.device_numbers();
    row_sort sort;
    sort.ids = step.ids_to_group();
    sort.count = step.position_count;
    sort.row_count = row_count;
    sort.sorted_ids = reinterpret_cast<std::uint64_t*>(memory_.data() + ids_bytes_);
    sort.positions = groups.positions;
    sort.scratch = memory_.data();
    sort.scratch_bytes = sort_bytes_;
    sort.kernels = kernels;
    sort.errors = {&numbers.errors, &step.host_numbers().errors, &numbers.counting};
    backend.sort_rows(sort, stream.native_handle());
    row_grouping grouping;
    grouping.sorted = {sort.sorted_ids, sort.positions, sort.count, true};
    grouping.errors = &numbers.errors;
    grouping.split_id = split_id;
    grouping.ids = groups.ids;
    grouping.groups = groups.groups;
    grouping.starts = groups.starts;
    grouping.id_count = &numbers.row_count;
    grouping.reported_count = &step.host_numbers().row_count;
    grouping.ranges = numbers.ranges;
    grouping.tile_counts = reinterpret_cast<std::uint32_t*>(memory_.data() + counts_bytes_);
    backend.group_rows(grouping, stream.native_handle());
}

}  // namespace pinflow::detail
