#include "src/core/fork_gate.hpp"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <new>

namespace pinflow::detail {

namespace {

/// A callback of a section may wait for the thread that forks, for example for Python's GIL.
constexpr std::chrono::milliseconds max_wait{200};

struct fork_state {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t sections = 0;
    std::atomic<bool> is_pending = false;
};

/// Never destroyed: threads of pinflow may outlive static objects.
fork_state& process_state() {
    alignas(fork_state) static std::byte memory[sizeof(fork_state)];
    static fork_state* const made = new (memory) fork_state;
    return *made;
}

void before_fork() {
    fork_state& state = process_state();
    std::unique_lock lock(state.mutex);
    state.is_pending = true;
    state.changed.wait_for(lock, max_wait, [&] { return state.sections == 0; });
    static_cast<void>(lock.release());  // locked until the fork is over
}

void after_fork() {
    fork_state& state = process_state();
    state.is_pending = false;
    state.mutex.unlock();
    state.changed.notify_all();
}

/// The threads of all sections stayed in the parent.
void after_fork_in_child() {
    new (&process_state()) fork_state;
}

}  // namespace

void watch_forks() {
    process_state();
    // late, so that fork calls it before handlers that lock what sections use
    static const int status = ::pthread_atfork(before_fork, after_fork, after_fork_in_child);
    static_cast<void>(status);  // without memory for handlers, a fork does not wait
}

unforked_section::unforked_section() {
    fork_state& state = process_state();
    std::unique_lock lock(state.mutex);
    state.changed.wait(lock, [&] { return !state.is_pending; });
    ++state.sections;
}

unforked_section::~unforked_section() {
    fork_state& state = process_state();
    {
        const std::scoped_lock lock(state.mutex);
        --state.sections;
    }
    state.changed.notify_all();
}

bool is_fork_pending() noexcept {
    return process_state().is_pending.load(std::memory_order_relaxed);
}

}  // namespace pinflow::detail
