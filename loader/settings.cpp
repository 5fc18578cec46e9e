#include "loader/settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "src/core/checked.hpp"
#include "src/core/enumerators.hpp"
#include "src/core/extent_stride.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/source_check.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t array_alignment_bytes = 256;  // the alignment of CUDA's allocations
constexpr std::uint64_t default_memory_bytes = std::uint64_t{1} << 30;

/// The maximum number of rows of sources whose rows have 0 bytes. A file bounds the number of rows that have
/// bytes, but a header of 128 bytes can declare 2^60 rows of 0 bytes. Delivering 2^30 of them in batches of
/// 64 takes minutes, 2^60 would take years.
constexpr std::uint64_t max_empty_rows = std::uint64_t{1} << 30;

/// Whether addresses and sizes of all mapped rows are multiples of 16 bytes.
bool are_aligned(const row_source& source) {
    return std::ranges::all_of(source.extents(), [&](const row_extent& extent) {
        return is_aligned(extent.data, source.row_size_bytes()) && is_aligned(nullptr, extent.stride_bytes);
    });
}

/// The sum over the extents of the bytes from the start of the first row to the end of the last. Without
/// extents, the bytes of all rows.
std::uint64_t total_span_bytes(const row_source& source) {
    const auto extents = source.extents();
    if (extents.empty()) return saturated(source.row_count(), source.row_size_bytes());
    std::uint64_t bytes = 0;
    for (const row_extent& extent : extents)
        bytes = saturated(bytes, 1, span_bytes(extent, source.row_size_bytes()));
    return bytes;
}

array_facts facts_of(const row_source& source, std::uint64_t rows_left) {
    const auto extents = source.extents();
    const auto is_mapped = [](const row_extent& extent) {
        return extent.data != nullptr || extent.row_count == 0;
    };
    const bool is_empty = source.row_count() == 0 || source.row_size_bytes() == 0;
    const bool has_mapped =
        std::ranges::any_of(extents, [](const row_extent& extent) { return extent.data != nullptr; });
    const std::string why = source.no_extents_reason();
    return {.name = source.description(),
            .row_bytes = source.row_size_bytes(),
            .row_count = source.row_count(),
            .span_bytes = total_span_bytes(source),
            .bytes_left = saturated(rows_left, source.row_size_bytes()),
            .extent_count = extents.size(),
            .is_file_backed = source.file_backed(),
            .is_mapped = is_empty || (!extents.empty() && std::ranges::all_of(extents, is_mapped)),
            .is_partly_mapped = has_mapped,
            .is_decoded = extents.empty() && !is_empty,
            // pinflow's own sources are in files, or say why they have no extents
            .is_callers_own = extents.empty() && !is_empty && !source.file_backed() && why.empty(),
            .has_files = std::ranges::none_of(
                extents, [](const row_extent& extent) { return extent.file == nullptr; }),
            .has_any_file =
                std::ranges::any_of(extents, [](const row_extent& extent) { return extent.file != nullptr; }),
            .is_strided = !has_contiguous_extents(source),
            .is_aligned = are_aligned(source),
            .not_mapped_reason = why.empty() ? "is not mapped in its delivered form" : why};
}

/// The most bytes of the staging buffers that all batches share: a quarter of the memory setting, which
/// counts as 1 GiB if it is 0, or an eighth of the available memory if that is less.
std::uint64_t max_staging_bytes(const slot_budget& budget) noexcept {
    const std::uint64_t allowed = budget.setting_bytes == 0 ? default_memory_bytes : budget.setting_bytes;
    return std::min(allowed, budget.available_bytes / 2) / 4;
}

/// Makes the sampler that the options describe.
sampler make_sampler(const loader_options& options, sources_view sources) {
    const std::uint64_t row_count = sources[0]->row_count();
    if (options.window_rows != 0 && options.order != order::windowed) {
        throw invalid_argument(
            fmt::format("a window of {} rows was asked for, but the order is {}: only the windowed order has "
                        "one",
                        options.window_rows, to_string(options.order)));
    }
    switch (options.order) {
        case order::sequential:
            return sampler::sequential(row_count);
        case order::shuffled:
            return sampler::shuffled(row_count, options.seed);
        case order::windowed: {
            if (options.window_rows != 0)
                return sampler::windowed(row_count, options.seed, options.window_rows);
            std::uint64_t sample_bytes = 0;
            for (const auto& source : sources)
                sample_bytes += source->row_size_bytes();
            return sampler::windowed(row_count, options.seed, default_window_rows(sample_bytes));
        }
        case order::listed:
        case order::weighted:
        case order::custom:
            break;
    }
    throw invalid_argument(
        fmt::format("the order {} needs a sampler: set loader_options::sampler, and leave "
                    "loader_options::order at its default",
                    to_string(options.order)));
}

}  // namespace

sources_view checked(sources_view sources) {
    if (sources.empty()) throw invalid_argument("a loader needs at least one source of rows");
    for (const auto& source : sources) {
        if (source == nullptr) throw invalid_argument("a loader was given a source of rows that is null");
        check_row_source(*source);
        if (source->row_count() != sources[0]->row_count()) {
            throw invalid_argument(
                fmt::format("the arrays of a sample need the same number of rows: {} has {}, but {} has {}",
                            sources[0]->description(), sources[0]->row_count(), source->description(),
                            source->row_count()));
        }
    }
    const auto has_bytes = [](const auto& source) { return source->row_size_bytes() > 0; };
    if (sources[0]->row_count() > max_empty_rows && std::ranges::none_of(sources, has_bytes)) {
        throw unsupported(
            fmt::format("cannot load {}: it has {} rows of 0 bytes, and a loader takes at most {} of those",
                        sources[0]->description(), sources[0]->row_count(), max_empty_rows));
    }
    return sources;
}

loader_options resolved(loader_options options, sources_view sources) {
    check_enumerator(options.order, order::custom, "order");
    check_enumerator(options.route, route::read, "route");
    check_enumerator(options.tail, tail::drop, "tail");
    if (options.slots == 1)
        throw invalid_argument("a loader needs at least 2 slots: one is filled while another is leased");
    if (options.resume_from && options.first_epoch != 0)
        throw invalid_argument("a loader was given a state and a first epoch: the state has the epoch");
    if (!options.sampler) {
        options.sampler = make_sampler(options, sources);
        return options;
    }
    if (options.order != order::sequential || options.seed != 0 || options.window_rows != 0) {
        throw invalid_argument(
            "a loader was given a sampler, and an order, a seed or a window as well: these belong to the "
            "sampler");
    }
    if (options.sampler->row_count() != sources[0]->row_count()) {
        throw invalid_argument(
            fmt::format("a sampler of {} rows was given for {}, which has {}; a weighted sampler has a row "
                        "for each weight",
                        options.sampler->row_count(), sources[0]->description(), sources[0]->row_count()));
    }
    options.order = options.sampler->order();
    return options;
}

std::vector<sample_array> arrays_of(sources_view sources, std::uint64_t rows_left) {
    std::vector<sample_array> arrays;
    for (const auto& source : sources)
        arrays.push_back({source, facts_of(*source, rows_left)});
    return arrays;
}

slot_layout lay_out(std::span<sample_array> arrays, const loader_options& options) {
    slot_layout layout;
    layout.row_count = std::min(options.batch_rows, options.sampler->position_count());
    for (sample_array& each : arrays) {
        each.offset_bytes = layout.side_bytes;
        std::uint64_t bytes = 0;
        if (!multiply(layout.row_count, each.row_bytes(), bytes) ||
            !add(bytes, array_alignment_bytes - 1, bytes) ||
            !add(layout.side_bytes, bytes / array_alignment_bytes * array_alignment_bytes,
                 layout.side_bytes)) {
            throw invalid_argument(fmt::format("a batch of {} rows is too large", options.batch_rows));
        }
    }
    return layout;
}

sample_facts facts_of_sample(const loader_options& options, const slot_layout& layout,
                             const slot_budget& budget, unsigned threads) {
    const bool on_host = options.device.kind() == device_kind::host;
    const auto requested = [&]() -> std::optional<transfer> {
        switch (options.route) {
            case route::direct:
                return on_host ? transfer::view : transfer::kernel;
            case route::copy:
                return on_host ? transfer::slot_copy : transfer::copy_engine;
            case route::staged:
                return transfer::staged;
            case route::read:
                return transfer::read;
            case route::automatic:
                break;
        }
        return std::nullopt;
    };
    std::uint64_t planned_bytes = budget.setting_bytes;
    // Only on the host does plan_sample depend on the available memory. On a GPU, held arrays are in device
    // memory, whose free size is not queried. A GPU's staging buffers are limited by max_staging_bytes and
    // size_slots.
    if (on_host && planned_bytes == 0 && budget.available_bytes / 2 < default_memory_bytes)
        planned_bytes = std::max<std::uint64_t>(budget.available_bytes / 2, 1);
    return {.on_host = on_host,
            .is_in_order = options.order == order::sequential,
            .batch_rows = layout.row_count,
            .cores = threads,
            .is_guarded = fault_guard_active(),
            .memory_bytes = planned_bytes,
            .max_staging_bytes = max_staging_bytes(budget),
            .requested = requested()};
}

slot_budget find_budget(const loader_options& options) {
    const available_memory available = read_available_memory();
    return {options.memory_bytes, available.size_bytes, available.bound};
}

namespace {

/// The memory of one slot: its sides and the lists of its rows.
struct slot_memory {
    std::uint64_t size_bytes = 0;
    std::uint64_t host_bytes = 0;  ///< the part that is host memory
};

slot_memory memory_of_slot(const loader_options& options, std::span<const sample_array> arrays,
                           const slot_layout& layout, const slot_sizes& sizes) {
    const bool has_lists =
        std::ranges::any_of(arrays, [](const sample_array& each) { return each.plan.pages.has_value(); });
    const std::uint64_t list_bytes =
        sizeof(std::uint64_t) + (has_lists ? arrays.size() * sizeof(copy_range) : 0);
    slot_memory memory;
    if (!multiply(layout.row_count, list_bytes, memory.host_bytes) ||
        !add(memory.host_bytes, sizes.host_side_bytes, memory.host_bytes) ||
        !add(memory.host_bytes, sizes.device_side_bytes, memory.size_bytes)) {
        throw invalid_argument(fmt::format("a batch of {} rows is too large", options.batch_rows));
    }
    if (options.device.kind() == device_kind::host) memory.host_bytes = memory.size_bytes;
    return memory;
}

/// The size of all arrays held in the memory of the loader's device.
std::uint64_t count_held_bytes(std::span<const sample_array> arrays) {
    std::uint64_t held_bytes = 0;
    for (const sample_array& each : arrays) {
        if (each.plan.main() != transfer::held) continue;
        held_bytes = saturated(each.facts.row_count, each.facts.row_bytes, held_bytes);
    }
    return held_bytes;
}

/// The part of a message about memory that says what held arrays and shared staging buffers take; empty if
/// there are none.
std::string other_part(std::uint64_t held_bytes, std::uint64_t staging_bytes) {
    if (held_bytes == 0 && staging_bytes == 0) return {};
    if (staging_bytes == 0) return fmt::format(", of which held arrays take {} bytes", held_bytes);
    if (held_bytes == 0) return fmt::format(", of which staging buffers take {} bytes", staging_bytes);
    return fmt::format(", of which held arrays take {} bytes and staging buffers {}", held_bytes,
                       staging_bytes);
}

}  // namespace

slot_sizes size_slots(const loader_options& options, std::span<const sample_array> arrays,
                      const slot_layout& layout, const slot_budget& budget, const group_plan& groups,
                      const staging_plan& staging) {
    const bool on_host = options.device.kind() == device_kind::host;
    const auto is_staged = [on_host](const sample_array& array) {
        const transfer_plan& plan = array.plan;
        if (on_host) return plan.main() == transfer::staged;
        return !plan.is_buffered && (plan.fallback || plan.main() == transfer::staged ||
                                     plan.main() == transfer::decode || plan.main() == transfer::read);
    };
    const bool has_views = arrays.front().plan.main() == transfer::view;
    const bool has_staging = std::ranges::any_of(arrays, is_staged);
    slot_sizes sizes;
    sizes.device_side_bytes = has_views ? 0 : layout.side_bytes;
    sizes.host_side_bytes = has_staging ? layout.side_bytes : 0;
    const slot_memory each = memory_of_slot(options, arrays, layout, sizes);
    const std::uint64_t held_bytes = count_held_bytes(arrays);

    // the limit of the options
    const auto fitting_in = [](std::uint64_t whole, std::uint64_t taken, std::uint64_t part) {
        return (whole - std::min(whole, taken)) / std::max<std::uint64_t>(1, part);
    };
    const std::uint64_t allowed =
        fitting_in(budget.setting_bytes == 0 ? default_memory_bytes : budget.setting_bytes,
                   saturated(staging.count, staging.buffer_bytes, held_bytes), each.size_bytes);
    const unsigned needed = options.slots == 0 ? 2 : options.slots;
    const char* const fewer_slots = options.slots > 2 ? ", or ask for fewer slots" : "";
    if (budget.setting_bytes != 0 && allowed < needed) {
        throw invalid_argument(fmt::format(
            "{} slots of {} bytes do not fit into {} bytes{}: allow more memory, or make batches smaller{}",
            needed, each.size_bytes, budget.setting_bytes, other_part(held_bytes, staging.size_bytes()),
            fewer_slots));
    }
    // the limit of the machine
    const std::uint64_t taken_host_bytes = on_host ? held_bytes : staging.size_bytes();
    if (fitting_in(budget.available_bytes, taken_host_bytes, each.host_bytes) < needed) {
        throw system_failure(
            fmt::format("{} slots of {} bytes take {} bytes of memory{}, more than the {} bytes that may be "
                        "taken of the memory that {}: make batches smaller{}",
                        needed, each.host_bytes, saturated(needed, each.host_bytes, taken_host_bytes),
                        on_host ? other_part(held_bytes, 0) : other_part(0, staging.size_bytes()),
                        budget.available_bytes, budget.bound, fewer_slots),
            std::make_error_code(std::errc::not_enough_memory));
    }
    if (options.slots != 0) {
        sizes.count = options.slots;
    } else {
        // by default a loader leaves half of the memory to others
        const std::uint64_t part = budget.setting_bytes == 0 ? 2 : 1;
        const std::uint64_t fitting =
            fitting_in(budget.available_bytes / part, taken_host_bytes, each.host_bytes);
        const auto clamped = [&](std::uint64_t count) {
            return static_cast<unsigned>(std::clamp<std::uint64_t>(count, 2, groups.max_slots));
        };
        sizes.count = clamped(std::min(allowed, fitting));
        if (const unsigned usual = clamped(allowed); sizes.count < usual) {
            sizes.reason = fmt::format(
                "{} slots instead of {}: {} fit into {}the {} bytes that may be taken of the memory that {}",
                sizes.count, usual, fitting, part == 2 ? "half of " : "", budget.available_bytes,
                budget.bound);
        }
    }
    if (std::uint64_t all_bytes = 0; !multiply(sizes.count, each.size_bytes, all_bytes)) {
        throw invalid_argument(
            fmt::format("{} slots of {} bytes are too large", sizes.count, each.size_bytes));
    }
    return sizes;
}

}  // namespace pinflow::detail
