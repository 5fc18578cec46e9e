#pragma once

#include <memory>
#include <span>
#include <string>

#include "pinflow/loader/loader.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::detail {

/// How a loader moves its rows, and why so.
struct route_choice {
    pinflow::route route = route::automatic;
    std::string reason;        ///< one sentence
    bool host_side = false;    ///< rows are gathered into a pinned host side, and copied from there
    bool device_side = false;  ///< batches lie in memory of their slot
    bool registers_pages =
        false;  ///< rows are copied from the mapped pages themselves, as far as they are registered
    bool device_gathers = false;  ///< those too small for the copy engine are gathered by the device itself,
                                  ///< once all pages are registered
};

/// Whether rows of `source` lie together in pieces that are large enough for the copy engine, in this order.
bool worth_copying(const row_source& source, const loader_options& options);

/// Chooses the route for these sources, or checks the one asked for.
/// @throws unsupported when the route asked for cannot work here.
route_choice choose_route(std::span<const std::shared_ptr<const row_source>> sources,
                          const loader_options& options);

}  // namespace pinflow::detail
