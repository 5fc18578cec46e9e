#pragma once

#include <string>

#include "src/load/load_plan.hpp"

namespace pinflow::detail {

/// How the units of a plan travel.
struct chosen_route {
    load_route route = load_route::staged;  ///< not automatic
    unsigned threads = 0;                   ///< that read, gather, decode and cast
    unsigned threads_without_pages = 0;     ///< the same, if no pages can be page-locked
    bool is_small = false;                  ///< the calling thread reads and decodes all of it
    std::string reason;
};

/// Chooses the route, for a GPU as plan_load_transfer says, and the number of threads.
/// @throws unsupported if the route `copy` is requested for a GPU, and some units are not copyable.
chosen_route choose_route(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
                          const load_options& options);

}  // namespace pinflow::detail
