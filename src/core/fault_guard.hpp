#pragma once

#include <memory>

/// Copies from mapped files that may be truncated at any time.
namespace pinflow::detail {

/// Whether the guard is active and works on this thread. If a thread blocks SIGBUS, a fault on it ends the
/// process, even with a handler.
bool is_guarded_thread() noexcept;

/// Runs `work(context)`. If it touches a page past the end of a truncated file, the rest of it is skipped.
/// `work` must hold no object with a destructor, and must take no lock. Calls must not be nested: the outer
/// call would lose its guard.
/// @return whether it ran to its end. Without pinflow's handler always true, if the process survives.
bool run_guarded(void (*work)(const void* context), const void* context) noexcept;

/// The same for a function object.
template <typename Work>
bool run_guarded(const Work& work) noexcept {
    return run_guarded([](const void* context) { (*static_cast<const Work*>(context))(); },
                       std::addressof(work));
}

}  // namespace pinflow::detail
