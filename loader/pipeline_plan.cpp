#include "loader/pipeline_plan.hpp"

#include <algorithm>

namespace pinflow::detail {

group_plan plan_groups(const sample_facts& sample, std::span<const transfer_plan> plans,
                       std::uint64_t batch_bytes, const link_profile& profile) {
    const auto has = [&](transfer how) {
        return std::ranges::any_of(plans, [=](const auto& plan) { return plan.find(how) != nullptr; });
    };
    if (has(transfer::view)) return {1, profile.min_slots};
    const bool is_buffered = std::ranges::any_of(plans, &transfer_plan::is_buffered);
    const std::uint64_t wanted_bytes = sample.on_host                       ? profile.host_group_bytes
                                       : is_buffered || has(transfer::read) ? profile.read_group_bytes
                                                                            : profile.group_bytes;
    const std::uint64_t fitting = wanted_bytes / std::max<std::uint64_t>(batch_bytes, 1);
    const auto batches =
        static_cast<unsigned>(std::clamp<std::uint64_t>(fitting, 1, profile.max_group_batches));
    const std::uint64_t groups = sample.on_host ? profile.host_groups_of_slots
                                 : is_buffered  ? profile.buffered_groups_of_slots
                                                : profile.groups_of_slots;
    // at most one epoch of slots, because batches read further ahead would miss later changes to the files
    // (but at least min_slots)
    const std::uint64_t slots = std::min<std::uint64_t>(batches * groups, sample.epoch_batches);
    return {batches, static_cast<unsigned>(std::max<std::uint64_t>(slots, profile.min_slots))};
}

staging_plan plan_staging(std::span<const transfer_plan> plans, unsigned threads,
                          const link_profile& profile) noexcept {
    const bool is_buffered = std::ranges::any_of(plans, &transfer_plan::is_buffered);
    return {is_buffered ? std::size_t{2} * threads : 0, profile.staging_buffer_bytes};
}

unsigned count_threads(const work_facts& work, unsigned threads, const link_profile& profile) noexcept {
    const unsigned beside =
        std::clamp(threads / 2, profile.min_beside_registering, profile.max_beside_registering);
    if (work.registers) return std::max(1U, std::min(threads - 1, beside));
    return work.needs_cpu ? threads : std::min(threads, profile.listing_threads);
}

bool next_waits_for_data(bool on_host, std::uint64_t group_bytes, const link_profile& profile) noexcept {
    return !on_host && group_bytes >= profile.min_awaited_bytes;
}

}  // namespace pinflow::detail
