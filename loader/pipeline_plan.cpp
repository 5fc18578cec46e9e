#include "loader/pipeline_plan.hpp"

#include <algorithm>
#include <cstddef>

#include "src/core/checked.hpp"

namespace pinflow::detail {

group_plan plan_groups(const sample_facts& sample, std::span<const transfer_plan> plans,
                       std::uint64_t batch_bytes, const link_profile& profile) {
    const auto has = [&](transfer how) {
        return std::ranges::any_of(plans, [=](const auto& plan) { return plan.find(how) != nullptr; });
    };
    if (has(transfer::view)) return {1, profile.min_slots, 0};
    // if pages are registered, only rows of pages that are not yet registered pass through the buffers
    const bool is_buffered =
        std::ranges::any_of(plans, &transfer_plan::is_buffered) &&
        std::ranges::none_of(plans, [](const transfer_plan& plan) { return plan.pages.has_value(); });
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
    return {batches, static_cast<unsigned>(std::max<std::uint64_t>(slots, profile.min_slots)),
            is_buffered ? profile.max_groups_filled : 0};
}

namespace {

/// Whether an array's rows, or those whose pages are not registered yet, may pass through shared buffers.
/// Kernels read such rows in the slots.
bool can_be_buffered(const transfer_plan& plan) {
    if (plan.main() == transfer::copy_engine) return plan.fallback && plan.pages && !plan.pages->is_required;
    return plan.main() == transfer::staged || plan.main() == transfer::read;
}

}  // namespace

staging_plan plan_staging(const sample_facts& sample, std::span<const array_facts> arrays,
                          std::span<transfer_plan> plans, std::uint64_t max_bytes,
                          const link_profile& profile) {
    const staging_plan buffers{
        std::min<std::size_t>(std::size_t{2} * sample.cores, profile.max_staging_buffers),
        profile.staging_buffer_bytes};
    bool has_long_batches = false;
    for (std::size_t i = 0; i < plans.size(); ++i) {
        if (plans[i].main() == transfer::held) continue;
        // otherwise slots need staging memory anyway
        if (!can_be_buffered(plans[i]) || arrays[i].row_bytes > buffers.buffer_bytes) return {};
        const std::uint64_t batch_rows = std::min(sample.batch_rows, arrays[i].row_count);
        has_long_batches =
            has_long_batches || saturated(arrays[i].row_bytes, batch_rows) >= profile.min_buffered_bytes;
    }
    if (sample.on_host || !has_long_batches || buffers.size_bytes() > max_bytes) return {};
    for (transfer_plan& plan : plans)
        plan.is_buffered = plan.main() != transfer::held;
    return buffers;
}

unsigned count_threads(const work_facts& work, unsigned threads, const link_profile& profile) noexcept {
    const unsigned beside =
        std::clamp(threads * 3 / 4, profile.min_beside_registering, profile.max_beside_registering);
    if (work.registers) return std::max(1U, std::min(threads - 1, beside));
    return work.needs_cpu ? threads : std::min(threads, profile.listing_threads);
}

bool next_waits_for_data(bool on_host, std::uint64_t group_bytes, const link_profile& profile) noexcept {
    return !on_host && group_bytes >= profile.min_awaited_bytes;
}

}  // namespace pinflow::detail
