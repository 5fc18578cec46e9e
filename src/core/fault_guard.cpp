#include "src/core/fault_guard.hpp"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <mutex>
#include <system_error>
#include <type_traits>

#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "src/core/system.hpp"

namespace pinflow {

namespace detail {

namespace {

struct guard_frame {
    sigjmp_buf end;  ///< where a guarded copy that failed continues
};

constexpr unsigned no_key = ~0U;

/// The pthread key under which each thread has the guard_frame of its guarded copy, while there is one. Not a
/// thread_local: a signal handler must not allocate, but the first access to a thread_local may, unless it is
/// in static thread-local storage. A library that is loaded late, such as the Python module, may find no room
/// there.
std::atomic<unsigned> frame_key = no_key;
static_assert(std::is_same_v<::pthread_key_t, unsigned>);

/// The action for SIGBUS before our handler was installed. Written once, before that.
struct sigaction previous_action;

void restore_default(int signal) {
    struct sigaction default_action{};
    default_action.sa_handler = SIG_DFL;
    ::sigaction(signal, &default_action, nullptr);
}

/// Whether the current instruction of the thread caused the signal. False if a process sent it, and if the
/// kernel reports damaged memory that no thread has read (BUS_MCEERR_AO).
bool is_of_instruction(const siginfo_t& info) {
    return info.si_code > 0 && info.si_code != BUS_MCEERR_AO;
}

/// Has the effect that the signal would have without our handler.
void pass_on(int signal, siginfo_t* info, void* context) {
    const bool is_fault = is_of_instruction(*info);  // the instruction would fault again
    // for either value of SA_SIGINFO: the two handlers share a union
    const bool has_function = previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN;
    if (!has_function) {
        if (previous_action.sa_handler == SIG_IGN && !is_fault) return;
        // the kernel also ends a process that ignores a fault
        restore_default(signal);
        if (!is_fault) ::raise(signal);
        return;
    }
    const bool is_called_once = (static_cast<unsigned>(previous_action.sa_flags) & SA_RESETHAND) != 0;
    if (is_called_once) restore_default(signal);
    sigset_t blocked = previous_action.sa_mask;
    if ((previous_action.sa_flags & SA_NODEFER) == 0) ::sigaddset(&blocked, signal);
    sigset_t before;
    ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
    if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
        previous_action.sa_sigaction(signal, info, context);
    } else {
        previous_action.sa_handler(signal);
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void handle_bus_error(int signal, siginfo_t* info, void* context) {
    const ::pthread_key_t key = frame_key.load(std::memory_order_relaxed);
    // in glibc this only reads memory of the thread
    auto* const frame = static_cast<guard_frame*>(::pthread_getspecific(key));
    if (frame == nullptr || !is_of_instruction(*info)) return pass_on(signal, info, context);
    ::pthread_setspecific(key, nullptr);
    // SIGBUS may be blocked here: by the wrapper that ThreadSanitizer puts around a handler, for example. If
    // it stayed blocked, the next fault of this thread would end the process.
    const sigset_t& before = static_cast<const ucontext_t*>(context)->uc_sigmask;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::siglongjmp(frame->end, 1);
}

}  // namespace

bool run_guarded(void (*work)(const void* context), const void* context) noexcept {
    const ::pthread_key_t key = frame_key.load(std::memory_order_relaxed);
    guard_frame frame;
    // the signal mask need not be saved: the handler restores it
    if (sigsetjmp(frame.end, 0) != 0) return false;
    // without memory for the thread's value there is no guard, as without the handler
    if (key == no_key || ::pthread_setspecific(key, &frame) != 0) {
        work(context);
        return true;
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);
    work(context);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    ::pthread_setspecific(key, nullptr);
    return true;
}

bool is_guarded_thread() noexcept {
    sigset_t blocked;
    return fault_guard_active() && ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked) == 0 &&
           ::sigismember(&blocked, SIGBUS) == 0;
}

}  // namespace detail

void install_fault_guard() {
    static std::mutex mutex;
    static bool installed = false;
    const std::lock_guard lock(mutex);
    if (installed) return;
    if (detail::frame_key == detail::no_key) {
        ::pthread_key_t key = 0;
        if (const int failed = ::pthread_key_create(&key, nullptr); failed != 0)
            throw system_failure("cannot install the fault guard: the process has no pthread key left",
                                 std::error_code(failed, std::system_category()));
        detail::frame_key = key;
    }
    detail::previous_action = detail::system::signal_action(SIGBUS);
    struct sigaction ours{};
    ours.sa_sigaction = detail::handle_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    detail::system::set_signal_action(SIGBUS, ours);
    installed = true;
}

bool fault_guard_active() noexcept {
    struct sigaction now{};
    return ::sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
           now.sa_sigaction == detail::handle_bus_error;
}

}  // namespace pinflow
