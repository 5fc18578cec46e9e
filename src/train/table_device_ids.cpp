#include <fmt/format.h>

#include <utility>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"
#include "src/rows/exchange_setup.hpp"
#include "src/rows/route_plan.hpp"
#include "src/train/table_state.hpp"

// What a table does for ids that the device groups. The host does not know how many differ, so kernels move
// the rows.

namespace pinflow {

using detail::table_step;

/// @throws invalid_argument for null; unsupported if kernels cannot move the rows.
void embedding_table::state::check_device_ids(row_ids ids) const {
    if (ids.data() == nullptr) throw invalid_argument("cannot fetch rows for null ids");
    if (exchange_ && !exchange_->is_in_place())
        throw unsupported(fmt::format(
            "cannot fetch rows for ids in device memory: the device cannot access the storage of the "
            "embedding table in place: {}",
            exchange_->plan_gather(ids.size()).reason));
}

/// Throws the error that the device has found in ids that it has grouped, once.
void embedding_table::state::throw_wrong_ids(table_step& step) {
    if (step.requested_on_device == nullptr || !step.grouped.done()) return;
    const detail::index_errors found = std::exchange(step.host_numbers().errors, {});
    if (found.outside_count == 0) return;
    throw invalid_argument(
        fmt::format("{} of {} ids in device memory were outside the embedding table of {} rows; the first is "
                    "ids[{}] = {}. "
                    "Nothing was fetched for them, and their commit changes nothing",
                    found.outside_count, step.position_count, options.row_count, found.outside_position,
                    static_cast<std::int64_t>(found.outside_id)));
}

void embedding_table::state::throw_wrong_ids() {
    for (const std::unique_ptr<table_step>& step : steps_)
        throw_wrong_ids(*step);
}

/// Whether the device groups many ids in host memory: it takes less time than the CPU, and the indices need
/// not cross the link. Kernels must reach the rows, as for ids in device memory.
bool embedding_table::state::can_group_on_device() const {
    if (is_on_host() || options.max_batch_ids < min_device_grouped_ids) return false;
    return !exchange_ || (exchange_->is_in_place() &&
                          exchange_->plan_gather(options.max_batch_ids).route == row_route::direct);
}

void embedding_table::state::make_grouper() {
    device_grouper_.emplace(options.max_batch_ids, groupings_, options.resource);
}

void embedding_table::state::group_on_device(const table_step& step) {
    if (!device_grouper_) make_grouper();
    device_grouper_->group(step, options.row_count, options.device_rows, groupings_);
}

std::uint64_t embedding_table::state::count_rows(const table_step& step) {
    if (step.requested_on_device != nullptr || !step.is_grouped_on_device) return step.row_count;
    step.grouped.synchronize();
    return step.host_numbers().row_count;
}

/// Enqueues the copy of a step's different ids, which the device has grouped, to its host memory.
void embedding_table::state::copy_ids_to_host(table_step& step) {
    if (step.is_listed) return;
    const std::span ids(step.host_groups().ids, count_rows(step));
    copy_to_host_async(std::as_writable_bytes(ids),
                       reinterpret_cast<const std::byte*>(step.device_groups().ids), lists_);
    detail::record_or_wait(step.listed, lists_);
    step.is_listed = true;
}

/// Calls move(transfer) for the rows below device_rows, and for those of the exchange.
template <typename Move>
void embedding_table::state::move_ranges(const table_step& step, detail::row_direction direction, Move move) {
    detail::row_transfer transfer;
    transfer.order.ids = step.device_groups().ids;
    transfer.order.count = step.position_count;
    transfer.parts.rows[0] = step.records.data();
    transfer.parts.first[1] = step.position_count;
    transfer.parts.count = 1;
    transfer.end = step.position_count;
    const detail::row_range* const ranges = step.device_numbers().ranges;
    if (options.device_rows != 0) {
        transfer.table = {first_rows_.data(), options.device_rows, layout.size_bytes};
        transfer.range = &ranges[0];
        move(std::as_const(transfer));
    }
    if (!exchange_) return;
    const std::span<std::byte> others = host_records();
    detail::call_facts call;
    call.is_scatter = direction == detail::row_direction::scatter;
    call.is_aligned = detail::is_aligned(others.data(), layout.size_bytes);
    call.row_bytes = layout.size_bytes;
    call.table_bytes = others.size();
    transfer.table = {others.data(), options.row_count - options.device_rows, layout.size_bytes,
                      options.device_rows};
    transfer.range = &ranges[1];
    transfer.is_ascending = true;
    transfer.blocks = detail::default_blocks(call);
    move(std::as_const(transfer));
}

void embedding_table::state::gather_ranges(const table_step& step) {
    move_ranges(step, detail::row_direction::gather, [&](const detail::row_transfer& transfer) {
        device.backend().gather_rows(transfer, gathers_.view().native_handle());
    });
}

void embedding_table::state::scatter_ranges(const table_step& step) {
    move_ranges(step, detail::row_direction::scatter, [&](const detail::row_transfer& transfer) {
        device.backend().scatter_rows(transfer, detail::repeated_rows::last, detail::sum_type::int32,
                                      writes_.view().native_handle());
    });
}

}  // namespace pinflow
