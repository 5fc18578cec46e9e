#include "loader/stage_seam.hpp"

#include <atomic>
#include <utility>

namespace pinflow::detail {

namespace {

stage_hook installed_hook;
std::atomic<bool> hook_installed = false;

}  // namespace

scoped_stage_hook::scoped_stage_hook(stage_hook hook) {
    installed_hook = std::move(hook);
    hook_installed.store(true, std::memory_order_release);
}

scoped_stage_hook::~scoped_stage_hook() {
    hook_installed.store(false, std::memory_order_release);
    installed_hook = nullptr;
}

void pass_stage_seam(stage where, std::uint64_t batch) {
    if (hook_installed.load(std::memory_order_acquire)) installed_hook(where, batch);
}

}  // namespace pinflow::detail
