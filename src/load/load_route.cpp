#include "src/load/load_route.hpp"

#include <fmt/format.h>
#include <tbb/info.h>

#include <algorithm>
#include <array>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/system.hpp"
#include "src/device/pin_limits.hpp"

namespace pinflow::detail {

namespace {

/// If the route is `automatic`, loads with fewer bytes for the copy engine are staged: page-locking costs
/// more than it saves.
constexpr std::uint64_t min_pinned_bytes = std::uint64_t{32} << 20;
constexpr unsigned max_threads = 16;
/// From this many threads on, staging alone is faster than staging while pages are registered.
/// Pages of tmpfs are registered one by one, those of other file systems in groups
/// (samples/bench/NOTEBOOK.md).
constexpr unsigned min_staging_cores = 8;
constexpr unsigned min_staging_cores_on_tmpfs = 4;
/// On the host device the calling thread reads up to this many bytes itself, because starting threads would
/// take longer.
constexpr std::uint64_t max_small_bytes = std::uint64_t{1} << 20;

/// Whether at least three quarters of the sampled pages are in the page cache. The samples are the first page
/// of each copyable unit, or, if there are 512 such units or more, of 256 to 384 of them. True if the file
/// system cannot tell.
bool is_in_page_cache(const opened_tensors& opened, const load_plan& plan) {
    constexpr std::size_t max_samples = 256;
    const std::size_t step = std::max<std::size_t>(plan.copyable.size() / max_samples, 1);
    std::size_t looked = 0, missing = 0;
    for (std::size_t i = 0; i < plan.copyable.size(); i += step) {
        const load_piece& piece = plan.pieces[plan.copyable[i].first_piece];
        const file_position place = position_of(opened, plan.jobs[piece.job]);
        const input_file& file = *opened.files[place.file];
        const descriptor_lease lease = file.lease_descriptor();
        std::array<std::byte, 1> byte{};
        bool supported = true;
        const auto read =
            system::read_cached_at(lease.get(), place.offset_bytes + piece.begin_bytes, byte, supported);
        if (!supported) return true;  // tmpfs of older kernels
        ++looked;
        if (!read) ++missing;
    }
    return missing * 4 <= looked;
}

/// Whether the first tensor for the copy engine is in a file on tmpfs.
bool is_on_tmpfs(const opened_tensors& opened, const load_plan& plan) {
    const load_piece& first = plan.pieces[plan.copyable.front().first_piece];
    return system::is_on_tmpfs(opened.absolute_paths[position_of(opened, plan.jobs[first.job]).file]);
}

}  // namespace

chosen_route choose_route(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
                          const load_options& options) {
    chosen_route chosen;
    chosen.route = options.route;
    const auto cores = static_cast<unsigned>(tbb::info::default_concurrency());
    std::uint64_t copyable_bytes = 0;
    for (const load_unit& unit : plan.copyable) {
        for (const load_piece& piece : plan.pieces_of(unit))
            copyable_bytes += piece.size_bytes;
    }
    if (device.kind() == device_kind::host) {
        chosen.route = load_route::staged;
        // a slice of a compressed tensor may take long
        chosen.is_small = plan.total_bytes - plan.mapped_bytes <= max_small_bytes &&
                          std::ranges::none_of(plan.others, &load_unit::is_decoded);
        chosen.reason = fmt::format(
            "{} are mapped, {} are read: tensors are mapped unless they must be gathered, decoded or cast, "
            "are not aligned or have a destination, or less than 1 MiB of their file is loaded",
            in_binary_units(plan.mapped_bytes), in_binary_units(plan.total_bytes - plan.mapped_bytes));
    } else if (chosen.route == load_route::copy) {
        if (!plan.others.empty())
            throw unsupported(
                "the route copy was requested, but some of the tensors must be decoded, cast or gathered, or "
                "are too short for the copy engine; request auto, staged or both instead");
        chosen.reason = "the route copy was requested";
    } else if (chosen.route != load_route::automatic) {
        chosen.reason = fmt::format("the route {} was requested", to_string(chosen.route));
    } else if (copyable_bytes < min_pinned_bytes) {
        chosen.route = load_route::staged;
        chosen.reason = fmt::format(
            "only {} can be copied from the pages of the files, and page-locking "
            "pays off from {} on",
            in_binary_units(copyable_bytes), in_binary_units(min_pinned_bytes));
    } else if (!is_in_page_cache(opened, plan)) {
        chosen.route = load_route::staged;
        chosen.reason = "the files are not in the page cache, and threads read them faster than page faults";
    } else {
        const bool in_memory = is_on_tmpfs(opened, plan);
        const unsigned readers = options.threads == 0 ? cores : std::min(options.threads, cores);
        const bool is_faster = readers >= (in_memory ? min_staging_cores_on_tmpfs : min_staging_cores);
        chosen.route = is_faster ? load_route::staged : load_route::both;
        chosen.reason =
            fmt::format("{} threads read {} than pages of {} are page-locked", readers,
                        is_faster ? "faster" : "slower", in_memory ? "tmpfs" : "this file system");
    }
    if (chosen.route == load_route::copy) return chosen;
    const unsigned all = std::clamp(cores, 1U, max_threads);
    // also beside page-locking: one thread fewer is as fast, or slower
    chosen.threads = options.threads != 0 ? options.threads : all;
    if (chosen.is_small) chosen.threads = 0;
    const std::size_t units = plan.copyable.size() + plan.others.size();
    chosen.threads = static_cast<unsigned>(std::min<std::size_t>(chosen.threads, units));
    return chosen;
}

}  // namespace pinflow::detail
