#pragma once

#include <memory>

/// Copying from mapped files whose pages may be lost at any moment.
namespace pinflow::detail {

/// Whether the guard is active and works on this thread: a fault of a thread that blocks SIGBUS ends the
/// process, whatever the handler.
bool is_guarded_thread() noexcept;

/// Runs `work(context)`. If it touches a page that its file has lost, the rest of it is left out.
/// `work` must hold nothing that needs a destructor, and must take no lock.
/// @return whether it ran to its end. Always true without pinflow's handler, if the process survives.
bool run_guarded(void (*work)(const void* context), const void* context) noexcept;

/// The same for a function object.
template <typename Work>
bool run_guarded(const Work& work) noexcept {
    return run_guarded([](const void* context) { (*static_cast<const Work*>(context))(); },
                       std::addressof(work));
}

}  // namespace pinflow::detail
