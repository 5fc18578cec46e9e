#include "src/load/load_route.hpp"

#include <fmt/format.h>
#include <tbb/info.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "pinflow/file.hpp"
#include "src/core/enumerators.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"
#include "src/device/page_releaser.hpp"
#include "src/device/pin_limits.hpp"
#include "src/rows/link_profile.hpp"
#include "src/rows/transfer_planner.hpp"

namespace pinflow::detail {

namespace {

/// More are not faster with 16 cores: the calling thread allocates memory and enqueues copies meanwhile.
/// Measured for loads to a GPU from tmpfs.
constexpr unsigned max_threads = 14;
/// The calling thread reads and decodes up to this many bytes itself, because starting threads would take
/// longer.
constexpr std::uint64_t max_small_bytes = std::uint64_t{1} << 20;

/// Whether at least three quarters of the sampled units, by their bytes, are in the page cache. The samples
/// are the first page of each copyable unit, or, if there are 512 such units or more, of 256 to 384 of them.
/// True if the file system cannot tell.
bool is_in_page_cache(const opened_tensors& opened, const load_plan& plan) {
    constexpr std::size_t max_samples = 256;
    const std::size_t step = std::max<std::size_t>(plan.copyable.size() / max_samples, 1);
    std::uint64_t looked_bytes = 0, missing_bytes = 0;
    for (std::size_t i = 0; i < plan.copyable.size(); i += step) {
        const load_piece& piece = plan.pieces[plan.copyable[i].first_piece];
        std::uint64_t unit_bytes = 0;
        for (const load_piece& each : plan.pieces_of(plan.copyable[i]))
            unit_bytes += each.size_bytes;
        const file_position place = span_of(opened, plan.jobs[piece.job], piece).begin;
        const input_file& file = *opened.files[place.file];
        const descriptor_lease lease = file.lease_descriptor();
        std::array<std::byte, 1> byte{};
        bool supported = true;
        const auto read = system::read_cached_at(lease.get(), place.offset_bytes, byte, supported);
        if (!supported) return true;  // tmpfs of older kernels
        looked_bytes += unit_bytes;
        if (!read) missing_bytes += unit_bytes;
    }
    return missing_bytes <= looked_bytes / 4;
}

/// Whether the first tensor for the copy engine is in a file on tmpfs.
bool is_on_tmpfs(const opened_tensors& opened, const load_plan& plan) {
    const load_piece& first = plan.pieces[plan.copyable.front().first_piece];
    return system::is_on_tmpfs(opened.absolute_paths[position_of(opened, plan.jobs[first.job]).file]);
}

/// Counts the copyable bytes, and estimates the rate at which threads read them.
void measure_copyable_units(const opened_tensors& opened, const load_plan& plan, load_facts& facts) {
    std::uint64_t cost_bytes = 0;  // contiguous bytes that a thread reads in the same time
    for (const load_unit& unit : plan.copyable) {
        for (const load_piece& piece : plan.pieces_of(unit)) {
            facts.copyable_bytes += piece.size_bytes;
            const load_job& job = plan.jobs[piece.job];
            if (unit.reads_gaps) {
                cost_bytes += span_of(opened, job, piece).size_bytes;
            } else if (job.has_gaps) {
                const std::uint64_t run_count = piece.size_bytes / runs_of(opened, job).size_bytes;
                cost_bytes += piece.size_bytes + run_count * thresholds.read_call_bytes;
            } else {
                cost_bytes += piece.size_bytes;
            }
        }
    }
    constexpr double min_noticed = 0.9;  // a few slices among many tensors do not change the route
    const auto copyable = static_cast<double>(facts.copyable_bytes), cost = static_cast<double>(cost_bytes);
    if (copyable < min_noticed * cost) facts.read_rate_ratio = copyable / cost;
}

std::vector<transfer_part> parts_of(load_route route) {
    const transfer_part copied{transfer::copy_engine}, staged{transfer::staged};
    switch (route) {
        case load_route::copy:
            return {copied};
        case load_route::staged:
            return {staged};
        case load_route::both:
            return {copied, staged};
        case load_route::automatic:
            break;
    }
    return {};
}

load_route route_of_load(const transfer_plan& plan) {
    if (plan.parts.size() == 2) return load_route::both;
    return plan.main() == transfer::copy_engine ? load_route::copy : load_route::staged;
}

unsigned count_cores() {
    return std::max(static_cast<unsigned>(tbb::info::default_concurrency()), 1U);
}

/// The number of threads if the caller does not choose one, and other work takes some of the cores.
unsigned default_threads(unsigned busy_cores) {
    return std::clamp(count_cores() - busy_cores, 1U, max_threads);
}

/// The most threads that may decode at once. Each needs up to four times the bytes of a chunk, and together
/// they take at most half of the available memory.
unsigned max_decoding_threads(const load_plan& plan) {
    constexpr std::uint64_t max_unlimited_chunk_bytes = std::uint64_t{16} << 20;
    if (plan.max_chunk_bytes <= max_unlimited_chunk_bytes) return std::numeric_limits<unsigned>::max();
    const std::uint64_t each_bytes = 4 * plan.max_chunk_bytes;
    const std::uint64_t fitting = read_available_memory().size_bytes / 2 / each_bytes;
    return static_cast<unsigned>(std::clamp<std::uint64_t>(fitting, 1, std::numeric_limits<unsigned>::max()));
}

/// Whether so little is read, gathered and decoded that no thread is worth starting.
bool is_small(const load_plan& plan) {
    constexpr std::size_t max_decoded = 16;  // each takes some time, however small it is
    return plan.total_bytes - plan.mapped_bytes <= max_small_bytes && plan.decoded_count <= max_decoded &&
           plan.decoded_bytes <= max_small_bytes;
}

/// The route of a load to host memory.
chosen_route choose_on_host(const load_plan& plan) {
    return {
        .reason = fmt::format(
            "{} are mapped, {} are read: tensors are mapped unless they must be gathered, decoded or cast, "
            "are not aligned or have a destination, or little of their file is loaded",
            in_binary_units(plan.mapped_bytes), in_binary_units(plan.total_bytes - plan.mapped_bytes))};
}

/// The route of a load to a GPU.
chosen_route choose_on_gpu(const opened_tensors& opened, const load_plan& plan, const load_options& options) {
    const unsigned threads = default_threads(0);
    load_facts facts{.is_all_copyable = plan.others.empty(),
                     .cores = count_cores(),
                     .threads = options.threads == 0 ? threads : std::min(options.threads, threads),
                     .is_unlocking = is_releasing_pages(),
                     .requested = parts_of(options.route),
                     .is_in_page_cache = [&] { return is_in_page_cache(opened, plan); },
                     .is_on_tmpfs = [&] { return is_on_tmpfs(opened, plan); }};
    measure_copyable_units(opened, plan, facts);
    transfer_plan chosen = plan_load_transfer(facts);
    if (options.route != load_route::automatic)
        chosen.reason = fmt::format("the route {} was requested", to_string(options.route));
    return {.route = route_of_load(chosen), .reason = std::move(chosen.reason)};
}

}  // namespace

chosen_route choose_route(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
                          const load_options& options) {
    check_enumerator(options.route, load_route::both, "load_route");
    chosen_route chosen =
        device.kind() == device_kind::host ? choose_on_host(plan) : choose_on_gpu(opened, plan, options);
    if (chosen.route == load_route::staged && is_small(plan)) {
        chosen.is_small = true;
        return chosen;
    }
    const auto count = [](unsigned wanted, std::size_t units) {
        return static_cast<unsigned>(std::min<std::size_t>(wanted, units));
    };
    const unsigned threads = options.threads != 0 ? options.threads : default_threads(0);
    // few for short loads: on a GPU, each thread needs buffers that take long to page-lock
    constexpr std::size_t min_threads = 4;
    const std::size_t units = std::min(plan.copyable.size() + plan.others.size(),
                                       plan.decoded_count + plan.total_bytes / load_unit_bytes + min_threads);
    chosen.threads_without_pages = count(std::min(threads, max_decoding_threads(plan)), units);
    if (chosen.route == load_route::copy) {
        chosen.threads = count(std::min(threads, max_decoding_threads(plan)), plan.others.size());
    } else if (chosen.route == load_route::both && options.threads == 0) {
        // page-locking takes a core
        chosen.threads = count(std::min(default_threads(1), max_decoding_threads(plan)), units);
    } else {
        chosen.threads = chosen.threads_without_pages;
    }
    return chosen;
}

}  // namespace pinflow::detail
