#include "loader/stage_seam.hpp"

#include <utility>

namespace pinflow::detail {

namespace {

hooks<stage_hook> installed_hooks;

}  // namespace

scoped_stage_hook::scoped_stage_hook(stage_hook hook) : scope_(installed_hooks, std::move(hook)) {}

void pass_stage_seam(stage where, std::uint64_t batch) {
    installed_hooks.ask([&](const stage_hook& hook) {
        hook(where, batch);
        return false;
    });
}

}  // namespace pinflow::detail
