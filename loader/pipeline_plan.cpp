#include "loader/pipeline_plan.hpp"

#include <algorithm>

namespace pinflow::detail {

group_plan plan_groups(const sample_facts& sample, std::span<const sample_array> arrays,
                       std::uint64_t batch_bytes) {
    const auto has = [&](transfer how) {
        return std::ranges::any_of(arrays, [=](const auto& each) { return each.plan.main() == how; });
    };
    if (has(transfer::view)) return {1, thresholds.min_slots, 0};
    // if pages are registered, only rows of pages that are not yet registered pass through the buffers
    const bool is_buffered =
        std::ranges::any_of(arrays, [](const auto& each) { return each.plan.is_buffered; }) &&
        std::ranges::none_of(arrays, [](const auto& each) { return each.plan.pages.has_value(); });
    const std::uint64_t host_bytes =
        std::min(thresholds.host_group_bytes * sample.cores, thresholds.max_host_group_bytes);
    const std::uint64_t wanted_bytes = sample.on_host                       ? host_bytes
                                       : is_buffered || has(transfer::read) ? thresholds.read_group_bytes
                                                                            : thresholds.group_bytes;
    const std::uint64_t fitting = wanted_bytes / std::max<std::uint64_t>(batch_bytes, 1);
    const auto batches =
        static_cast<unsigned>(std::clamp<std::uint64_t>(fitting, 1, thresholds.max_group_batches));
    const std::uint64_t groups = sample.on_host ? thresholds.host_groups_of_slots
                                 : is_buffered  ? thresholds.buffered_groups_of_slots
                                                : thresholds.groups_of_slots;
    // at most one epoch of slots, because batches read further ahead would miss later changes to the files
    // (but at least min_slots)
    const std::uint64_t slots = std::min<std::uint64_t>(batches * groups, sample.epoch_batches);
    // A caller's own source may take long for each call, and gains nothing from a group: its batches are
    // filled concurrently, and the first one is delivered as soon as it is filled. Other arrays of the
    // sample then have no groups, either.
    const bool has_own_source =
        std::ranges::any_of(arrays, [](const auto& each) { return each.facts.is_callers_own; });
    return {has_own_source ? 1 : batches,
            static_cast<unsigned>(std::max<std::uint64_t>(slots, thresholds.min_slots)),
            is_buffered ? thresholds.max_groups_filled : 0};
}

unsigned count_threads(const work_facts& work, unsigned threads) noexcept {
    const unsigned beside =
        std::clamp(threads * 3 / 4, thresholds.min_beside_registering, thresholds.max_beside_registering);
    if (work.registers) return std::max(1U, std::min(threads - 1, beside));
    if (work.needs_cpu) return threads;
    const std::uint64_t moved_bytes =
        work.is_in_order ? thresholds.bytes_while_listing_in_order : thresholds.bytes_while_listing;
    const std::uint64_t wanted = work.sample_bytes == 0 ? 0 : moved_bytes / work.sample_bytes;
    return static_cast<unsigned>(
        std::min<std::uint64_t>(threads, std::max<std::uint64_t>(thresholds.listing_threads, wanted)));
}

bool next_waits_for_data(device_kind kind, std::uint64_t group_bytes) noexcept {
    return kind != device_kind::host && group_bytes >= thresholds.min_awaited_bytes;
}

}  // namespace pinflow::detail
