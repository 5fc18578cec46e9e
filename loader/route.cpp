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

void check_direct(sources_view sources, const loader_options& options) {
    if (options.order != order::sequential) {
        refuse(route::direct,
               "a view of the mapping holds rows in the order of the file, so it needs the sequential order");
    }
    for (const auto& source : sources) {
        const auto extents = source->extents();
        if (extents.size() != 1 || (extents[0].data == nullptr && source->row_size_bytes() > 0)) {
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

route_choice choose_on_cuda(sources_view sources, const loader_options& options) {
    switch (options.route) {
        case route::direct:
            refuse(route::direct, "the loader has no kernel that reads rows from registered memory yet");
        case route::copy:
            refuse(route::copy, "the loader cannot register mapped files yet");
        case route::read:
            check_read(sources);
            return {route::read, "asked for: rows are read from the file into a pinned slot", true, true};
        case route::staged:
            return {route::staged, "asked for: rows are gathered into a pinned slot, then copied", true,
                    true};
        case route::automatic:
            break;
    }
    return {route::staged, "rows are gathered into a pinned slot, then copied", true, true};
}

}  // namespace

route_choice choose_route(sources_view sources, const loader_options& options) {
    return options.device.kind() == device_kind::host ? choose_on_host(sources, options)
                                                      : choose_on_cuda(sources, options);
}

}  // namespace detail

}  // namespace pinflow
