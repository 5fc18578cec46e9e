#include "src/rows/transfer_planner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow::detail {

// ---- the arrays of a sample ------------------------------------------------------------------------------

namespace {

/// The default number of thread blocks: few, so that rows in flight are neighbours and most SMs stay free for
/// other kernels.
unsigned default_blocks(const call_facts& call, const link_profile& profile) {
    if (!call.is_aligned) return busy_blocks(call, profile);
    if (call.is_scatter && call.table_bytes > profile.large_table_bytes) return busy_blocks(call, profile);
    const bool is_long = !call.is_scatter && call.row_bytes >= profile.min_long_bytes;
    return is_long ? profile.long_gather_blocks : profile.usual_blocks;
}

/// Chooses the arrays to hold: small arrays of files beside a larger one, the smallest first.
std::vector<bool> choose_held(const sample_facts& sample, std::span<const array_facts> arrays,
                              const link_profile& profile) {
    const auto size_of = [&](std::size_t i) { return saturated(arrays[i].row_bytes, arrays[i].row_count); };
    std::vector<std::size_t> by_size(arrays.size());
    std::iota(by_size.begin(), by_size.end(), std::size_t{0});
    std::ranges::sort(by_size, {}, [&](auto i) { return std::pair(size_of(i), ~i); });
    by_size.pop_back();  // the largest array (of equal ones the first) is streamed
    std::uint64_t left = profile.max_held_bytes;
    if (sample.memory_bytes != 0) left = std::min(left, sample.memory_bytes / 4);  // most is for slots
    std::vector<bool> held(arrays.size(), false);
    for (const std::size_t i : by_size) {
        if (!arrays[i].is_file_backed || size_of(i) > left) continue;
        if (arrays[i].bytes_left < size_of(i) / 8) continue;  // most of its rows would never be delivered
        held[i] = true;
        left -= size_of(i);
    }
    return held;
}

/// Why rows of this array cannot travel like this; empty if they can.
std::string reason_against(transfer how, const sample_facts& sample, const array_facts& array) {
    if (how == transfer::read && !array.has_files)
        return fmt::format("{} has no file to read from", array.name);
    if (how == transfer::view && !sample.is_in_order)
        return "a view of the mapping holds rows in the order of the file, so it needs the sequential order";
    const bool needs_mapping =
        how == transfer::view || how == transfer::copy_engine || how == transfer::kernel;
    if (needs_mapping && !array.is_mapped) return fmt::format("{} {}", array.name, array.not_mapped_reason);
    if (how == transfer::view && array.extent_count != 1)
        return fmt::format("{} is not mapped in one piece in its delivered form", array.name);
    return {};
}

/// How pages are registered while their rows are delivered; nothing if that is not worth it.
std::optional<registration> plan_registration(const sample_facts& sample, const array_facts& array,
                                              const link_profile& profile) {
    const auto size_bytes = static_cast<double>(saturated(array.row_bytes, array.row_count));
    const auto bytes_left = static_cast<double>(array.bytes_left);
    const double stage_gbps = std::min(profile.stage_gbps_per_core * sample.cores, profile.max_stage_gbps);
    const bool comes_again = bytes_left > size_bytes;
    // for a single pass, many cores stage rows at the rate of the link, and registration would slow them down
    if (!comes_again && stage_gbps >= profile.max_stage_gbps) return std::nullopt;
    if (!sample.is_in_order) {
        // in random order, registration helps once about half of the pages are registered
        const bool is_over_before = bytes_left / stage_gbps < size_bytes / profile.register_gbps / 2;
        return is_over_before ? std::nullopt : std::optional(registration{});
    }
    // pieces are registered ahead of the reader; with one or two cores, rows wait for late pieces
    const bool is_awaited = sample.cores <= profile.registering_cores;
    return registration{.is_awaited = is_awaited,
                        .registers_rest = is_awaited || comes_again,
                        .piece_bytes = profile.piece_bytes};
}

transfer_plan only(transfer_part part, std::string reason) {
    return {{part}, std::nullopt, std::nullopt, std::move(reason)};
}

transfer_plan plan_on_host(const sample_facts& sample, const array_facts& array) {
    if (sample.requested == transfer::view)
        return only({transfer::view},
                    "requested: batches are views of the mapping; reading lost pages of a truncated file "
                    "raises SIGBUS");
    if (sample.requested == transfer::staged)
        return only({transfer::staged}, "requested: rows pass through a staging buffer, as for a GPU");
    if (sample.requested == transfer::read)
        return only({transfer::read}, "requested: rows are read from the file into the slot");
    if (!array.is_mapped && !array.is_partly_mapped)
        return only({transfer::decode}, "rows are read or decoded into the slot");
    const bool maps = sample.is_guarded || !array.is_file_backed;
    return only({transfer::slot_copy},
                maps ? "the host device needs one copy, from the mapping into the slot"
                     : "the host device reads rows into the slot, as the fault guard is not installed");
}

/// The average number of contiguous rows. A run ends where a batch or an extent ends.
std::uint64_t rows_together(const sample_facts& sample, const array_facts& array) {
    if (!sample.is_in_order) return 1;
    if (array.extent_count <= 1) return std::min(sample.batch_rows, array.row_count);
    const std::uint64_t rows = array.row_count / array.extent_count;
    return std::max<std::uint64_t>(1, sample.batch_rows * rows / (sample.batch_rows + rows));
}

transfer_plan plan_on_cuda(const sample_facts& sample, const array_facts& array,
                           const link_profile& profile) {
    const bool sorts = !sample.is_in_order && array.row_bytes < profile.min_unsorted_bytes &&
                       saturated(array.row_bytes, array.row_count) > profile.covered_bytes;
    const call_facts gather{.is_aligned = array.is_aligned,
                            .row_bytes = array.row_bytes,
                            .table_bytes = saturated(array.row_bytes, array.row_count),
                            .not_reached_reason = {}};
    const transfer_part kernel{transfer::kernel, 1, sorts, default_blocks(gather, profile)};
    const transfer_part engine{.how = transfer::copy_engine,
                               .min_piece_bytes = array.has_any_file ? profile.min_copied_bytes : 0};
    if (sample.requested == transfer::kernel || sample.requested == transfer::copy_engine) {
        const bool by_kernel = sample.requested == transfer::kernel;
        transfer_plan plan =
            only(by_kernel ? kernel : engine, "requested: the device reads the mapped pages");
        plan.pages = {.is_required = true, .is_awaited = true};
        if (!by_kernel && array.has_any_file) plan.fallback = transfer::staged;
        return plan;
    }
    if (sample.requested == transfer::read)
        return only({transfer::read}, "requested: rows are read from the file into a staging buffer");
    const transfer staged = array.is_decoded ? transfer::decode : transfer::staged;
    if (sample.requested)
        return only({staged}, "requested: rows are gathered into a staging buffer, then copied");
    if (saturated(array.row_bytes, array.row_count) == 0) return only({staged}, "there are no bytes to move");
    if (!array.is_mapped && !array.is_partly_mapped)
        return only({staged}, fmt::format("{} {}", array.name, array.not_mapped_reason));
    if (array.row_bytes <= profile.max_trivial_bytes && (sample.is_guarded || !array.is_file_backed))
        return only({staged}, "the CPU gathers rows this small as fast as it lists their addresses");
    const bool by_engine = rows_together(sample, array) * array.row_bytes >= profile.min_engine_bytes;
    const bool reads = by_engine && array.has_files && sample.cores >= profile.min_reading_cores;
    const std::optional<registration> pages = plan_registration(sample, array, profile);
    if (!pages) {
        return only({reads ? transfer::read : staged},
                    "the rows that are left to deliver travel as fast without registered pages");
    }
    transfer_plan plan = by_engine ? only(engine, "the copy engine reads the mapped pages")
                                   : only(kernel, "the device gathers small pieces from the mapped pages");
    plan.pages = pages;
    plan.fallback = reads ? transfer::read : transfer::staged;
    return plan;
}

}  // namespace

std::vector<transfer_plan> plan_sample(const sample_facts& sample, std::span<const array_facts> arrays,
                                       const link_profile& profile) {
    const std::vector<bool> held = choose_held(sample, arrays, profile);
    std::vector<transfer_plan> plans;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        if (held[i] && sample.requested != transfer::view) {
            plans.push_back(only({transfer::held}, "small: it is kept on the loader's device"));
            continue;
        }
        const std::string refusal =
            sample.requested ? reason_against(*sample.requested, sample, arrays[i]) : "";
        if (!refusal.empty()) throw unsupported(refusal);
        plans.push_back(sample.on_host ? plan_on_host(sample, arrays[i])
                                       : plan_on_cuda(sample, arrays[i], profile));
    }
    return plans;
}

// ---- calls of a row exchange -----------------------------------------------------------------------------

namespace {

/// The plan for a route, with the settings of the options.
transfer_plan plan_of(row_route route, bool sorted, const call_facts& call, const link_profile& profile,
                      std::string reason = {}) {
    const unsigned blocks = call.blocks != 0 ? call.blocks : default_blocks(call, profile);
    const double share = call.staged_share != 0 ? call.staged_share : profile.default_staged_share;
    if (route == row_route::copy) return only({transfer::copy_engine}, std::move(reason));
    if (route == row_route::staged) return only({transfer::staged, 1, sorted}, std::move(reason));
    transfer_plan plan = only({transfer::kernel, 1, sorted, blocks}, std::move(reason));
    if (route != row_route::hybrid) return plan;
    plan.parts.front().share = 1 - share;
    plan.parts.push_back({transfer::staged, share, sorted});
    return plan;
}

/// Whether rows of a route that was not measured are sorted.
bool sorts(row_route route, const call_facts& call, const link_profile& profile) {
    return call.is_scatter || route == row_route::hybrid ||
           (route == row_route::direct && call.row_bytes < profile.min_long_bytes);
}

}  // namespace

unsigned busy_blocks(const call_facts& call, const link_profile& profile) noexcept {
    if (call.row_bytes >= profile.min_long_bytes) return profile.busy_long_blocks;
    return call.table_bytes > profile.large_table_bytes ? profile.busy_large_blocks : profile.busy_blocks;
}

std::optional<transfer_plan> plan_call(const call_facts& call, const link_profile& profile) {
    const auto plan = [&](row_route route, std::string_view reason) {
        return plan_of(route, sorts(route, call, profile), call, profile, std::string(reason));
    };
    if (call.requested == row_route::copy && call.is_file_backed && !call.on_host)
        return plan(row_route::direct,
                    "a kernel gathers rows of files: CUDA may copy short rows with the CPU, which faults if "
                    "the file is truncated");
    if (call.requested != row_route::automatic) return plan(call.requested, "requested in the options");
    if (!call.not_reached_reason.empty()) return plan(row_route::staged, call.not_reached_reason);
    if (call.on_host && call.is_file_backed)
        return plan(
            row_route::staged,
            "the file may be truncated at any time, so the CPU copies its rows under the fault guard, or "
            "reads them");
    if (call.on_host)
        return plan_of(row_route::direct, call.is_scatter, call, profile,
                       "the host device copies rows directly");
    if (call.table_bytes == 0) return plan(row_route::direct, "the table has no bytes");
    return std::nullopt;
}

transfer_plan plan_by_sizes(const call_facts& call, const link_profile& profile) {
    const bool are_short = call.row_bytes < profile.min_unsorted_bytes;
    const bool can_stage = !call.is_file_backed && tries_staging(call, profile);
    if (are_short && can_stage && call.table_bytes > profile.huge_table_bytes &&
        call.threads >= profile.min_staging_threads) {
        return plan_of(call.is_scatter ? row_route::staged : row_route::hybrid, true, call, profile,
                       "not measured: kernels are slow with short rows of a table this large");
    }
    if (call.is_scatter)
        return plan_of(row_route::direct, true, call, profile, "not measured: kernels scatter in place");
    if (call.has_host_ids && !call.is_file_backed && call.row_bytes >= profile.min_engine_bytes)
        return plan_of(row_route::copy, false, call, profile,
                       "not measured: the copy engine copies long rows");
    const bool order_matters = are_short && call.table_bytes > profile.covered_bytes;
    const bool is_sorted = order_matters && saturated(call.row_bytes, call.count) >= profile.min_sorted_bytes;
    return plan_of(row_route::direct, is_sorted, call, profile,
                   is_sorted       ? "not measured: kernels read short rows in the order of their addresses"
                   : order_matters ? "not measured: sorting so few bytes takes longer than it saves"
                                   : "not measured: kernels read these rows as fast in any order");
}

bool tries_staging(const call_facts& call, const link_profile& profile) noexcept {
    return call.staging_buffer_bytes >= profile.min_staging_bytes;
}

std::vector<transfer_plan> gather_candidates(const call_facts& call, const link_profile& profile) {
    std::vector<transfer_plan> plans{plan_of(row_route::direct, false, call, profile),
                                     plan_of(row_route::direct, true, call, profile)};
    if (call.is_file_backed)
        return plans;  // CUDA may copy short rows with the CPU, which would fault on a truncated file
    if (call.has_host_ids && call.row_bytes >= profile.min_copied_row_bytes)
        plans.push_back(plan_of(row_route::copy, false, call, profile));
    if (tries_staging(call, profile))
        plans.push_back(plan_of(row_route::staged, !call.has_host_ids, call, profile));
    return plans;
}

transfer_plan hybrid_candidate(const call_facts& call, double kernel_gbps, double staged_gbps,
                               const link_profile& profile) {
    call_facts shared = call;
    // the two share the link: the shares are chosen so that both finish at the same time
    if (shared.staged_share == 0)
        shared.staged_share = std::clamp(staged_gbps / (kernel_gbps + staged_gbps), 0.1, 0.6);
    return plan_of(row_route::hybrid, true, shared, profile);
}

const rated_plan& fastest(std::span<const rated_plan> measured, const link_profile& profile) {
    const rated_plan* best = &measured.front();
    for (const rated_plan& each : measured)
        if (each.gbps > best->gbps * profile.min_gain) best = &each;
    return *best;
}

rated_plan judge_scatter(const call_facts& call, double kernel_gbps, double staged_gbps, double link,
                         const link_profile& profile) {
    // the hybrid route gained only some percent, so it is not considered
    const double direct = std::min(kernel_gbps * profile.direct_scatter_ratio, link);
    const double staged = std::min(staged_gbps * profile.staged_scatter_ratio, link);
    const bool stages = staged > direct * profile.min_gain;
    return {plan_of(stages ? row_route::staged : row_route::direct, true, call, profile),
            stages ? staged : direct};
}

}  // namespace pinflow::detail
