#include "src/rows/transfer_planner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/device/pin_limits.hpp"
#include "src/rows/route_plan.hpp"

namespace pinflow::detail {

// ---- the arrays of a sample ------------------------------------------------------------------------------

namespace {

/// Holds small arrays of files beside a larger one, the smallest first.
void hold_small(const sample_facts& sample, std::span<sample_array> arrays) {
    std::vector<sample_array*> by_size(arrays.size());
    std::ranges::transform(arrays, by_size.begin(), [](sample_array& each) { return &each; });
    std::ranges::sort(by_size, {}, [&](sample_array* each) {
        return std::pair(each->facts.size_bytes(), &arrays.back() - each);
    });
    by_size.pop_back();  // the largest array (of equal ones the first) is streamed
    std::uint64_t left = thresholds.max_held_bytes;
    if (sample.memory_bytes != 0) left = std::min(left, sample.memory_bytes / 4);  // most is for slots
    for (sample_array* const each : by_size) {
        const std::uint64_t size_bytes = each->facts.size_bytes();
        if (!each->facts.is_file_backed || size_bytes > left) continue;
        if (each->facts.bytes_left < size_bytes / 8) continue;  // most of its rows would never be delivered
        each->plan = only({transfer::held}, "small: it is kept on the loader's device");
        left -= size_bytes;
    }
}

void refuse_impossible(transfer how, const sample_facts& sample, const array_facts& array) {
    if (how == transfer::read && !array.has_files)
        throw unsupported(fmt::format("{} has rows with no file to read from", array.name));
    if (how == transfer::view && !sample.is_in_order)
        throw unsupported(
            "a view of the mapping holds rows in the order of the file, so it needs the sequential order");
    const bool needs_map = how == transfer::view || how == transfer::copy_engine || how == transfer::kernel;
    if (needs_map && !array.is_mapped)
        throw unsupported(fmt::format("{} {}", array.name, array.not_mapped_reason));
    if (how == transfer::view && (array.extent_count != 1 || array.is_strided))
        throw unsupported(fmt::format("{} is not mapped as one piece of contiguous rows", array.name));
}

/// How pages are registered while their rows are delivered; nothing if that is not worth it.
std::optional<registration> plan_registration(const sample_facts& sample, const array_facts& array) {
    const auto span_bytes = static_cast<double>(array.span_bytes);
    const auto bytes_left = static_cast<double>(array.bytes_left);
    const double stage_gbps =
        std::min(thresholds.stage_gbps_per_core * sample.cores, thresholds.max_stage_gbps);
    const bool comes_again = bytes_left > span_bytes * thresholds.min_passes;
    const bool is_sparse = array.span_bytes / thresholds.max_registered_ratio > array.size_bytes();
    // for a single pass, many cores stage rows at the rate of the link, and registration would slow them down
    if (is_sparse || (!comes_again && stage_gbps >= thresholds.max_stage_gbps)) return std::nullopt;
    // in random order, registration helps once about half of the pages are registered
    const bool is_over_before = bytes_left / stage_gbps < span_bytes / thresholds.register_gbps / 2;
    if (!sample.is_in_order) return is_over_before ? std::nullopt : std::optional(registration{});
    // pieces are registered ahead of the reader; with one or two cores, rows wait for late pieces
    const bool is_awaited = sample.cores <= thresholds.registering_cores;
    return registration{.is_awaited = is_awaited,
                        .registers_rest = is_awaited || comes_again,
                        .piece_bytes = thresholds.piece_bytes};
}

transfer_plan plan_on_host(const sample_facts& sample, const array_facts& array) {
    if (sample.requested == transfer::view)
        return only({transfer::view},
                    "requested: views of the mapping; reading lost pages of a truncated file raises SIGBUS");
    if (sample.requested == transfer::staged)
        return only({transfer::staged}, "requested: rows pass through a staging buffer, as for a GPU");
    if (sample.requested == transfer::read)
        return only({transfer::read}, "requested: rows are read from the file into the slot");
    if (!array.is_mapped && !array.is_partly_mapped)
        return only({transfer::decode}, "rows are read or decoded into the slot");
    const bool maps = sample.is_guarded || !array.is_file_backed;
    return only({transfer::slot_copy},
                maps ? "the host device needs one copy, from where the rows lie into the slot"
                     : "the host device reads rows into the slot, as the fault guard is not installed");
}

/// The average number of contiguous rows. A run ends where a batch or an extent ends.
std::uint64_t average_run_rows(const sample_facts& sample, const array_facts& array) {
    if (!sample.is_in_order || array.is_strided) return 1;
    if (array.extent_count <= 1) return std::min(sample.batch_rows, array.row_count);
    const std::uint64_t rows = array.row_count / array.extent_count;
    return std::max<std::uint64_t>(1, sample.batch_rows * rows / (sample.batch_rows + rows));
}

transfer_plan plan_on_cuda(const sample_facts& sample, const array_facts& array) {
    const bool sorts = !sample.is_in_order && array.row_bytes < thresholds.min_unsorted_bytes &&
                       array.span_bytes > thresholds.covered_bytes;
    const call_facts gather{
        .is_aligned = array.is_aligned, .row_bytes = array.row_bytes, .table_bytes = array.span_bytes};
    const transfer_part kernel{.how = transfer::kernel, .sorted = sorts, .blocks = default_blocks(gather)};
    const transfer_part engine{.how = transfer::copy_engine,
                               .min_piece_bytes = array.has_any_file ? thresholds.min_copied_bytes : 0,
                               .read_piece_bytes = thresholds.short_pieces_bytes};
    if (sample.requested == transfer::kernel || sample.requested == transfer::copy_engine) {
        transfer_plan plan = only(sample.requested == transfer::kernel ? kernel : engine,
                                  "requested: the device reads the mapped pages");
        plan.pages = {.is_required = true, .is_awaited = true};
        if (plan.main() == transfer::copy_engine && array.has_any_file) plan.fallback = transfer::staged;
        return plan;
    }
    if (sample.requested == transfer::read)
        return only({transfer::read}, "requested: rows are read from the file into a staging buffer");
    const transfer staged = array.is_decoded ? transfer::decode : transfer::staged;
    if (sample.requested)
        return only({staged}, "requested: rows are gathered into a staging buffer, then copied");
    if (array.size_bytes() == 0) return only({staged}, "there are no bytes to move");
    if (!array.is_mapped && !array.is_partly_mapped)
        return only({staged}, fmt::format("{} {}", array.name, array.not_mapped_reason));
    const bool by_engine = average_run_rows(sample, array) * array.row_bytes >= thresholds.min_engine_bytes;
    const bool has_threads = sample.is_in_order || sample.cores >= thresholds.min_staging_threads;
    if (array.row_bytes <= thresholds.max_trivial_bytes && !by_engine &&
        (!array.is_file_backed || (sample.is_guarded && has_threads)))
        return only({staged}, "the CPU gathers rows of so few bytes");
    const bool reads = by_engine && array.has_files && sample.cores >= thresholds.min_reading_cores;
    const std::optional<registration> pages = plan_registration(sample, array);
    if (!pages)
        return only({reads ? transfer::read : staged},
                    "the rows that are left to deliver travel as fast without registered pages");
    transfer_plan plan = by_engine ? only(engine, "the copy engine reads the mapped pages")
                                   : only(kernel, "the device gathers small pieces from the mapped pages");
    plan.pages = pages;
    plan.fallback = reads ? transfer::read : transfer::staged;
    return plan;
}

/// Marks the arrays whose rows pass through shared staging buffers: on a GPU, if one array has long batches,
/// and the rows of all can. If those of one cannot, slots need staging memory anyway.
staging_plan share_buffers(const sample_facts& sample, std::span<sample_array> arrays) {
    const staging_plan buffers{
        std::min<std::size_t>(std::size_t{2} * sample.cores, thresholds.max_staging_buffers),
        thresholds.staging_buffer_bytes};
    bool has_long_batches = false;
    for (const sample_array& each : arrays) {
        const transfer_plan& plan = each.plan;
        if (plan.main() == transfer::held) continue;
        // rows of the copy engine do until their pages are registered; kernels read such rows in the slots
        const bool is_engine =
            plan.main() == transfer::copy_engine && plan.fallback && plan.pages && !plan.pages->is_required;
        const bool is_cpu = plan.main() == transfer::staged || plan.main() == transfer::read;
        if ((!is_engine && !is_cpu) || each.row_bytes() > buffers.buffer_bytes) return {};
        const std::uint64_t batch_rows = std::min(sample.batch_rows, each.facts.row_count);
        if (saturated(each.row_bytes(), batch_rows) >= thresholds.min_buffered_bytes) has_long_batches = true;
    }
    if (sample.on_host || !has_long_batches || buffers.size_bytes() > sample.max_staging_bytes) return {};
    for (sample_array& each : arrays)
        each.plan.is_buffered = each.plan.main() != transfer::held;
    return buffers;
}

}  // namespace

staging_plan plan_sample(const sample_facts& sample, std::span<sample_array> arrays) {
    if (sample.requested != transfer::view) hold_small(sample, arrays);
    for (sample_array& each : arrays) {
        if (!each.plan.parts.empty()) continue;  // held
        if (sample.requested) refuse_impossible(*sample.requested, sample, each.facts);
        each.plan = sample.on_host ? plan_on_host(sample, each.facts) : plan_on_cuda(sample, each.facts);
    }
    return share_buffers(sample, arrays);
}

row_access plan_access(const access_facts& rows) noexcept {
    if (!rows.is_mapped) return row_access::source;
    if (!rows.is_file_backed) return row_access::memory;
    return rows.can_be_guarded && !rows.has_waited_lately ? row_access::memory : row_access::source;
}

// ---- calls of a row exchange -----------------------------------------------------------------------------

namespace {

/// What the options, the device or the kind of table determine; nothing if there is a choice.
std::optional<call_route> forced_choice(const call_facts& call) {
    const auto forced = [&](row_route route, std::string_view reason) {
        const bool sorts = route == row_route::direct && call.row_bytes < thresholds.min_long_bytes;
        return call_route{.route = route, .reason = reason, .is_sorted = sorts};
    };
    if (call.on_host && call.is_file_backed && call.requested != row_route::staged)
        return call_route{
            row_route::direct,
            "on the host device the CPU copies rows of files without staging buffers, under the "
            "fault guard or with pread"};
    if (call.requested == row_route::copy && call.is_file_backed)
        return forced(
            row_route::direct,
            "a kernel gathers rows of files: CUDA may copy short rows with the CPU, which faults if "
            "the file is truncated");
    if (call.requested != row_route::automatic) return forced(call.requested, "requested in the options");
    if (!call.not_reached_reason.empty()) return forced(row_route::staged, call.not_reached_reason);
    if (call.on_host) return call_route{row_route::direct, "the host device copies rows directly"};
    if (call.table_bytes == 0) return forced(row_route::direct, "the table has no bytes");
    return std::nullopt;
}

/// The choice if nothing was measured.
call_route choice_by_sizes(const call_facts& call) {
    const bool are_short = call.row_bytes < thresholds.min_unsorted_bytes;
    const bool can_stage = call.can_stage && !call.is_file_backed && tries_staging(call);
    if (are_short && can_stage && call.table_bytes > thresholds.huge_table_bytes &&
        call.threads >= thresholds.min_staging_threads) {
        return {call.is_scatter ? row_route::staged : row_route::hybrid,
                "not measured: kernels are slow with short rows of a table this large"};
    }
    if (call.is_scatter) return {row_route::direct, "not measured: kernels scatter in place"};
    if (call.ids == ids_in::host_memory && !call.is_file_backed &&
        call.row_bytes >= thresholds.min_engine_bytes)
        return {row_route::copy, "not measured: the copy engine copies long rows"};
    if (!are_short || call.table_bytes <= thresholds.covered_bytes)
        return {row_route::direct, "not measured: kernels read these rows as fast in any order"};
    if (saturated(call.row_bytes, call.count) < thresholds.min_sorted_bytes)
        return {row_route::direct, "not measured: sorting so few bytes takes longer than it saves"};
    return {.reason = "not measured: kernels read short rows in the order of their addresses",
            .is_sorted = true};
}

}  // namespace

bool has_choice(const call_facts& call) {
    return !forced_choice(call).has_value();
}

rated_plan plan_call(const call_facts& call, std::optional<rated_plan> measured) {
    if (const std::optional<call_route> forced = forced_choice(call)) return {plan_of(*forced, call)};
    const bool is_possible = measured && (call.can_stage || measured->plan.find(transfer::staged) == nullptr);
    return is_possible ? *std::move(measured) : rated_plan{plan_of(choice_by_sizes(call), call)};
}

std::vector<transfer_plan> gather_candidates(const call_facts& call) {
    const bool has_host_ids = call.ids == ids_in::host_memory;
    std::vector<transfer_plan> plans{plan_of({row_route::direct}, call), plan_of({.is_sorted = true}, call)};
    if (call.is_file_backed)
        return plans;  // CUDA may copy short rows with the CPU, which would fault on a truncated file
    if (has_host_ids && call.row_bytes >= thresholds.min_copied_row_bytes)
        plans.push_back(plan_of({row_route::copy}, call));
    if (tries_staging(call))
        plans.push_back(plan_of({.route = row_route::staged, .is_sorted = !has_host_ids}, call));
    return plans;
}

transfer_plan hybrid_candidate(const call_facts& call, double kernel_gbps, double staged_gbps) {
    const double share = std::clamp(staged_gbps / (kernel_gbps + staged_gbps), 0.1, 0.6);
    return plan_of({.route = row_route::hybrid, .staged_share = share}, call);
}

const rated_plan& fastest(std::span<const rated_plan> measured) {
    const rated_plan* best = &measured.front();
    for (const rated_plan& each : measured)
        if (each.gbps > best->gbps * thresholds.min_gain) best = &each;
    return *best;
}

rated_plan judge_scatter(const call_facts& call, double kernel_gbps, double staged_gbps, double link_gbps) {
    // the hybrid route gained only some percent, so it is not considered
    const double direct = std::min(kernel_gbps * thresholds.direct_scatter_ratio, link_gbps);
    const double staged = std::min(staged_gbps * thresholds.staged_scatter_ratio, link_gbps);
    const bool stages = staged > direct * thresholds.min_gain;
    return {plan_of({stages ? row_route::staged : row_route::direct}, call), stages ? staged : direct};
}

// ---- loads of tensors ------------------------------------------------------------------------------------

transfer_plan plan_load_transfer(const load_facts& load) {
    const transfer_part copied{transfer::copy_engine}, staged{transfer::staged};
    const auto& requested = load.requested;
    if (requested.size() == 1 && requested[0].how == transfer::copy_engine && !load.is_all_copyable)
        throw unsupported(
            "the route copy was requested, but some of the tensors must be decoded, cast or gathered, or are "
            "too short for the copy engine; request auto, staged or both instead");
    if (!requested.empty()) return {requested, std::nullopt, std::nullopt, "requested"};
    if (load.copyable_bytes < thresholds.min_pinned_bytes)
        return only(
            staged,
            fmt::format("only {} can be copied from pages, and page-locking pays off from {} on",
                        in_binary_units(load.copyable_bytes), in_binary_units(thresholds.min_pinned_bytes)));
    if (!load.is_in_page_cache())
        return only(staged, "the files are not in the page cache: reads are faster than page faults");
    if (load.cores <= thresholds.registering_cores)
        return only(copied, "with so few cores, page-locking is faster if no thread stages meanwhile");
    const bool frees = load.is_unlocking && load.is_on_tmpfs();
    const unsigned limit = frees ? thresholds.min_load_threads_while_unlocking : thresholds.min_load_threads;
    const auto readers = std::max(static_cast<unsigned>(load.threads * load.read_rate_ratio), 1U);
    constexpr auto text = "{} cores or threads read{}: page-locking beside it pays off with fewer than {}{}";
    const auto as = readers < load.threads ? fmt::format(" slices at the rate of {} threads", readers) : "";
    const char* const when = frees ? " on tmpfs while pages of an earlier load are unlocked" : "";
    transfer_plan plan = only(staged, fmt::format(text, load.threads, as, limit, when));
    if (readers < limit) plan.parts.insert(plan.parts.begin(), copied);
    return plan;
}

}  // namespace pinflow::detail
