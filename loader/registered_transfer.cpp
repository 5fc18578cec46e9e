#include "loader/registered_transfer.hpp"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "pinflow/error.hpp"
#include "src/device/pin_limits.hpp"

namespace pinflow::detail {

namespace {

pin_options pinning_of(const sample_array& array, const loader_setup& setup) {
    pin_options options = setup.pinning;
    options.allow_partial = !array.plan.pages->is_required;
    if (array.plan.pages->piece_bytes != 0) options.piece_bytes = array.plan.pages->piece_bytes;
    options.registers_rest = array.plan.pages->registers_rest;
    const auto extents = array.source->extents();
    if (setup.first_row > 0 && setup.first_row < array.source->row_count() && !extents.empty()) {
        const auto [extent, index] = extent_index(extents).find(setup.first_row);
        if (extent->data != nullptr)
            options.begin_at = extent->data + index * stride_of(*extent, array.row_bytes());
    }
    return options;
}

}  // namespace

registered_transfer::registered_transfer(sample_array planned, const loader_setup& setup)
    : array_transfer(std::move(planned)),
      setup_(setup),
      extents_(array().source->extents()),
      reader_(array().source,
              array().plan.fallback == transfer::read ? row_access::source : row_access::memory,
              setup.is_in_order ? row_reader::list_order::ascending : row_reader::list_order::any),
      pages_(pin_ranges(array().source), setup.device, pinning_of(array(), setup)) {
    if (array().plan.pages->is_required) require_pages();
}

void registered_transfer::require_pages() const {
    try {
        pages_.require();
    } catch (const unsupported&) {
        array().source->check_unchanged();  // reports data_changed for a truncated file
        throw;
    }
}

std::string registered_transfer::reason() const {
    std::string reason = array().plan.reason;
    const pin_report pinned = pages_.report();
    reason += "; " + (pinned.finished ? pinned.reason
                                      : fmt::format("{} of {} are registered so far",
                                                    in_binary_units(pinned.registered_bytes),
                                                    in_binary_units(pinned.total_bytes)));
    if (const std::uint64_t staged = staged_bytes_; staged > 0)
        reason += fmt::format("; {} {}", in_binary_units(staged), to_string(fallback()));
    return reason;
}

transfer registered_transfer::main() const {
    if (!pages_.finished()) return array().plan.main();
    // of the whole array: the report of the pages counts mapped rows only
    return pages_.report().registered_bytes * 2 < array().facts.span_bytes ? fallback() : array().plan.main();
}

void registered_transfer::stage(slot& filling, slot_group& group, const staged_rows& rows) {
    group.jobs.push_back({&filling, &reader_, rows.ids, rows.target, rows.on_device});
    group.has_buffered = group.has_buffered || rows.target == nullptr;
    note_staged(rows.ids.size() * array().row_bytes());
}

std::byte* registered_transfer::host_rows(const slot& filling) const {
    if (filling.host_side == nullptr) refuse_unregistered();
    return filling.host_side + array().offset_bytes;
}

void registered_transfer::refuse_unregistered() const {
    throw unsupported(fmt::format("pages of {} are not registered", array().facts.name));
}

/// Waits until these bytes are registered, as long as they may be, and registration makes progress. After a
/// standstill, no row waits any more: unregistered rows take the fallback.
void registered_transfer::await(const std::byte* data, std::uint64_t size_bytes) {
    const pin_run run = pages_.run_at(data, size_bytes);
    if (stands_still_ || (run.registered && run.size_bytes >= size_bytes)) return;
    constexpr std::chrono::milliseconds look_interval{1};
    std::uint64_t seen_bytes = pages_.report().registered_bytes;
    auto changed = std::chrono::steady_clock::now();
    while (!pages_.wait_for(data, size_bytes, look_interval)) {
        if (!pages_.may_cover(data, size_bytes) || setup_.is_stopped()) return;
        const auto now = std::chrono::steady_clock::now();
        const std::uint64_t registered_bytes = pages_.report().registered_bytes;
        if (registered_bytes != seen_bytes) changed = now;
        seen_bytes = registered_bytes;
        if (now - changed > thresholds.max_page_wait) stands_still_ = true;
        if (stands_still_) return;
    }
}

}  // namespace pinflow::detail
