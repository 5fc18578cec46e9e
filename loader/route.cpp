#include "loader/route.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "pinflow/error.hpp"

namespace pinflow {

std::string_view to_string(route route) noexcept {
    switch (route) {
        case route::automatic:
            return "auto";
        case route::direct:
            return "direct";
        case route::copy:
            return "copy";
        case route::staged:
            return "staged";
        case route::read:
            return "read";
    }
    return "unknown";
}

namespace detail {

namespace {

using sources_view = std::span<const std::shared_ptr<const row_source>>;

[[noreturn]] void refuse(route asked, const std::string& why) {
    throw unsupported(fmt::format("the route {} cannot be taken: {}", to_string(asked), why));
}

/// Why the rows of a source cannot be taken where they lie.
std::string why_not_in_place(const row_source& source) {
    const std::string why = source.why_no_extents();
    return fmt::format("{} {}", source.description(), why.empty() ? "is not mapped as it is delivered" : why);
}

void check_direct(sources_view sources, const loader_options& options) {
    if (options.order != order::sequential) {
        refuse(route::direct,
               "a view of the mapping holds rows in the order of the file, so it needs the sequential order");
    }
    for (const auto& source : sources) {
        const auto extents = source->extents();
        if (extents.empty()) refuse(route::direct, why_not_in_place(*source));
        if (extents.size() != 1 ||
            (extents[0].data == nullptr && source->row_count() * source->row_size_bytes() > 0)) {
            refuse(route::direct,
                   fmt::format("{} is not mapped in one piece as it is delivered", source->description()));
        }
    }
}

void check_read(sources_view sources) {
    for (const auto& source : sources) {
        const bool in_memory = std::ranges::any_of(
            source->extents(), [](const row_extent& extent) { return extent.file == nullptr; });
        if (in_memory) refuse(route::read, fmt::format("{} has no file to read from", source->description()));
    }
}

route_choice choose_on_host(sources_view sources, const loader_options& options) {
    switch (options.route) {
        case route::direct:
            check_direct(sources, options);
            return {route::direct,
                    "asked for: batches are views of the mapping, a truncated file faults their reader",
                    false, false};
        case route::staged:
            return {route::staged,
                    "asked for: rows are gathered into the slot's host side, then copied by a stream, as for "
                    "a GPU",
                    true, true};
        case route::read:
            check_read(sources);
            return {route::read, "asked for: rows are read from the file into the slot", false, true};
        case route::copy:
            return {route::copy, "asked for: one copy from the page cache into the slot", false, true};
        case route::automatic:
            break;
    }
    return {route::copy, "the host device needs one copy, from the page cache into the slot", false, true};
}

/// One piece of a batched copy costs the engine as much time as some 28 KiB do.
constexpr std::uint64_t least_piece_bytes = 32 << 10;

/// Why the copy engine cannot read the rows of these sources where they lie; empty when it can.
std::string why_no_copy(sources_view sources) {
    for (const auto& source : sources) {
        if (source->row_count() * source->row_size_bytes() == 0) continue;
        const auto extents = source->extents();
        const bool mapped = !extents.empty() && std::ranges::all_of(extents, [](const row_extent& extent) {
            return extent.data != nullptr;
        });
        if (!mapped) return why_not_in_place(*source);
    }
    return {};
}

/// Why the device cannot gather the rows of these sources by their addresses; empty when it can.
std::string why_no_device_gather(sources_view sources) {
    if (std::string why = why_no_copy(sources); !why.empty()) return why;
    for (const auto& source : sources) {
        if (source->extents().size() > 1) {
            return fmt::format("{} is not mapped in one piece", source->description());
        }
    }
    return {};
}

route_choice choose_on_cuda(sources_view sources, const loader_options& options) {
    switch (options.route) {
        case route::direct:
            if (const std::string why = why_no_device_gather(sources); !why.empty())
                refuse(route::direct, why);
            return {route::direct, "asked for: the device reads rows from the mapped pages",
                    false,         true,
                    true,          true};
        case route::copy:
            if (const std::string why = why_no_copy(sources); !why.empty()) refuse(route::copy, why);
            return {route::copy, "asked for: the copy engine reads the mapped pages", false, true, true};
        case route::read:
            check_read(sources);
            return {route::read, "asked for: rows are read from the file into a pinned slot", true, true,
                    false};
        case route::staged:
            return {route::staged, "asked for: rows are gathered into a pinned slot, then copied", true, true,
                    false};
        case route::automatic:
            break;
    }
    if (const std::string why = why_no_copy(sources); !why.empty()) {
        return {route::staged, why, true, true, false};
    }
    std::uint64_t batch_bytes = 0;
    std::uint64_t copied_bytes = 0;
    for (const auto& source : sources) {
        batch_bytes += source->row_size_bytes();
        if (worth_copying(*source, options)) copied_bytes += source->row_size_bytes();
    }
    if (copied_bytes * 2 < batch_bytes && why_no_device_gather(sources).empty()) {
        return {route::direct,
                fmt::format("the device reads rows of less than {} bytes from the mapped pages",
                            least_piece_bytes),
                true,
                true,
                true,
                true};
    }
    if (copied_bytes * 2 < batch_bytes || batch_bytes == 0) {
        return {route::staged,
                fmt::format("pieces of less than {} bytes are too small for the copy engine: rows are "
                            "gathered into a pinned slot, then copied",
                            least_piece_bytes),
                true, true, false};
    }
    return {route::copy, "the copy engine reads the mapped pages", true, true, true};
}

}  // namespace

bool worth_copying(const row_source& source, const loader_options& options) {
    const std::uint64_t rows_together =
        options.order == order::sequential ? std::min(options.batch_rows, source.row_count()) : 1;
    return rows_together * source.row_size_bytes() >= least_piece_bytes;
}

route_choice choose_route(sources_view sources, const loader_options& options) {
    return options.device.kind() == device_kind::host ? choose_on_host(sources, options)
                                                      : choose_on_cuda(sources, options);
}

}  // namespace detail

}  // namespace pinflow
