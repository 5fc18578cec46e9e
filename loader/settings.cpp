#include "loader/settings.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t array_alignment_bytes = 256;  // what CUDA's own allocations have
constexpr std::uint64_t default_memory_bytes = std::uint64_t{1} << 30;
constexpr unsigned most_slots = 8;
/// Of slots that the device fills together, a quarter of them at a time: the more rows, the nearer they lie.
constexpr unsigned most_slots_together = 64;

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

unsigned count_slots(const loader_options& options, std::uint64_t each_bytes, bool filled_together) {
    const std::uint64_t limit = options.memory_bytes == 0 ? default_memory_bytes : options.memory_bytes;
    const std::uint64_t fitting = limit / std::max<std::uint64_t>(1, each_bytes);
    const unsigned least = options.slots == 0 ? 2 : options.slots;
    if (options.memory_bytes != 0 && fitting < least) {
        throw invalid_argument(fmt::format(
            "{} slots of {} bytes do not fit into {} bytes: allow more memory, or make batches smaller",
            least, each_bytes, options.memory_bytes));
    }
    if (options.slots != 0) return options.slots;
    const unsigned most = filled_together ? most_slots_together : most_slots;
    return static_cast<unsigned>(std::clamp<std::uint64_t>(fitting, 2, most));
}

}  // namespace pinflow::detail
