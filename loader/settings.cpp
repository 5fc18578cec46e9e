#include "loader/settings.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "src/core/checked.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t array_alignment_bytes = 256;  // what CUDA's own allocations have
constexpr std::uint64_t default_memory_bytes = std::uint64_t{1} << 30;

/// Whether every mapped row lies at a multiple of 16 bytes, and has such a size.
bool are_aligned(const row_source& source) {
    return std::ranges::all_of(source.extents(), [&](const row_extent& extent) {
        return is_aligned(extent.data, source.row_size_bytes());
    });
}

/// The order that is described by options alone.
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
    throw invalid_argument(fmt::format(
        "the order {} needs more than options say: make a sampler of it, and give the loader that",
        to_string(options.order)));
}

}  // namespace

std::vector<std::shared_ptr<const row_source>> checked(
    std::vector<std::shared_ptr<const row_source>> sources) {
    if (sources.empty()) throw invalid_argument("a loader needs at least one source of rows");
    for (const auto& source : sources) {
        if (source == nullptr) throw invalid_argument("a loader was given a source of rows that is null");
        if (source->row_count() != sources[0]->row_count()) {
            throw invalid_argument(
                fmt::format("the arrays of a sample need equal row counts: {} has {}, {} has {}",
                            sources[0]->description(), sources[0]->row_count(), source->description(),
                            source->row_count()));
        }
    }
    return sources;
}

loader_options resolved(loader_options options, sources_view sources) {
    if (options.slots == 1)
        throw invalid_argument("a loader needs at least 2 slots: one is filled while another is held");
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
        throw invalid_argument(fmt::format("a sampler of {} rows was given for {}, which has {}",
                                           options.sampler->row_count(), sources[0]->description(),
                                           sources[0]->row_count()));
    }
    options.order = options.sampler->order();
    return options;
}

slot_layout lay_out(sources_view sources, const loader_options& options) {
    slot_layout layout;
    layout.row_count = std::min(options.batch_rows, options.sampler->position_count());
    for (const auto& source : sources) {
        layout.array_offsets.push_back(layout.side_bytes);
        std::uint64_t bytes = 0;
        if (!multiply(layout.row_count, source->row_size_bytes(), bytes) ||
            !add(bytes, array_alignment_bytes - 1, bytes) ||
            !add(layout.side_bytes, bytes / array_alignment_bytes * array_alignment_bytes,
                 layout.side_bytes)) {
            throw invalid_argument(fmt::format("a batch of {} rows is too large", options.batch_rows));
        }
    }
    return layout;
}

sample_facts facts_of_sample(const loader_options& options, const slot_layout& layout, unsigned threads) {
    const bool on_host = options.device.kind() == device_kind::host;
    const auto asked = [&]() -> std::optional<transfer> {
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
    return {.on_host = on_host,
            .is_in_order = options.order == order::sequential,
            .batch_rows = layout.row_count,
            .cores = threads,
            .is_guarded = fault_guard_active(),
            .memory_bytes = options.memory_bytes,
            .asked = asked()};
}

std::vector<array_facts> facts_of_arrays(sources_view sources, std::uint64_t rows_left) {
    std::vector<array_facts> facts;
    for (const auto& source : sources) {
        const auto extents = source->extents();
        const auto is_mapped = [](const row_extent& extent) {
            return extent.data != nullptr || extent.row_count == 0;
        };
        const bool is_empty = source->row_count() == 0 || source->row_size_bytes() == 0;
        const bool has_mapped =
            std::ranges::any_of(extents, [](const row_extent& extent) { return extent.data != nullptr; });
        const std::string why = source->why_no_extents();
        facts.push_back(
            {.name = source->description(),
             .row_bytes = source->row_size_bytes(),
             .row_count = source->row_count(),
             .bytes_left = saturated(rows_left, source->row_size_bytes()),
             .extent_count = extents.size(),
             .is_file_backed = source->file_backed(),
             .is_mapped = is_empty || (!extents.empty() && std::ranges::all_of(extents, is_mapped)),
             .is_partly_mapped = has_mapped,
             .is_decoded = extents.empty() && !is_empty,
             .has_files = std::ranges::none_of(
                 extents, [](const row_extent& extent) { return extent.file == nullptr; }),
             .has_any_file = std::ranges::any_of(
                 extents, [](const row_extent& extent) { return extent.file != nullptr; }),
             .is_aligned = are_aligned(*source),
             .why_not_mapped = why.empty() ? "is not mapped as it is delivered" : why});
    }
    return facts;
}

slot_sizes size_slots(const loader_options& options, sources_view sources, const slot_layout& layout,
                      std::span<const transfer_plan> plans, const group_plan& groups) {
    const auto is_staged = [](const transfer_plan& plan) {
        return plan.fallback || plan.main() == transfer::staged || plan.main() == transfer::decode ||
               plan.main() == transfer::read;
    };
    const bool on_host = options.device.kind() == device_kind::host;
    const bool has_views = plans.front().main() == transfer::view;
    const bool has_staging = std::ranges::any_of(plans, [&](const transfer_plan& plan) {
        return on_host ? plan.main() == transfer::staged : is_staged(plan);
    });
    slot_sizes sizes;
    sizes.device_side_bytes = has_views ? 0 : layout.side_bytes;
    sizes.host_side_bytes = has_staging ? layout.side_bytes : 0;

    // a slot's memory: its sides, and the lists of the rows that are in it
    const bool has_lists =
        std::ranges::any_of(plans, [](const transfer_plan& plan) { return plan.pages.has_value(); });
    const std::uint64_t list_bytes =
        sizeof(std::uint64_t) + (has_lists ? sources.size() * sizeof(copy_range) : 0);
    std::uint64_t each_bytes = 0;
    if (!multiply(layout.row_count, list_bytes, each_bytes) ||
        !add(each_bytes, sizes.host_side_bytes, each_bytes) ||
        !add(each_bytes, sizes.device_side_bytes, each_bytes)) {
        throw invalid_argument(fmt::format("a batch of {} rows is too large", options.batch_rows));
    }
    std::uint64_t limit = options.memory_bytes == 0 ? default_memory_bytes : options.memory_bytes;
    for (std::size_t i = 0; i < plans.size(); ++i) {
        if (plans[i].main() != transfer::held) continue;
        limit -= std::min(limit, saturated(sources[i]->row_count(), sources[i]->row_size_bytes()));
    }
    const std::uint64_t fitting = limit / std::max<std::uint64_t>(1, each_bytes);
    const unsigned needed = options.slots == 0 ? 2 : options.slots;
    if (options.memory_bytes != 0 && fitting < needed) {
        throw invalid_argument(fmt::format(
            "{} slots of {} bytes do not fit into {} bytes: allow more memory, or make batches smaller",
            needed, each_bytes, options.memory_bytes));
    }
    sizes.count = options.slots != 0
                      ? options.slots
                      : static_cast<unsigned>(std::clamp<std::uint64_t>(fitting, 2, groups.max_slots));
    if (std::uint64_t all_bytes = 0; !multiply(sizes.count, each_bytes, all_bytes))
        throw invalid_argument(fmt::format("{} slots of {} bytes are too large", sizes.count, each_bytes));
    return sizes;
}

}  // namespace pinflow::detail
