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

struct gate {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t sections = 0;
    std::atomic<bool> is_pending = false;
};

/// Never destroyed: threads of pinflow may outlive static objects.
gate& process_gate() {
    alignas(gate) static std::byte memory[sizeof(gate)];
    static gate* const made = new (memory) gate;
    return *made;
}

void before_fork() {
    gate& each = process_gate();
    std::unique_lock lock(each.mutex);
    each.is_pending = true;
    each.changed.wait_for(lock, max_wait, [&] { return each.sections == 0; });
    static_cast<void>(lock.release());  // locked until the fork is over
}

void after_fork() {
    gate& each = process_gate();
    each.is_pending = false;
    each.mutex.unlock();
    each.changed.notify_all();
}

/// The threads of all sections stayed in the parent.
void after_fork_in_child() {
    new (&process_gate()) gate;
}

}  // namespace

void watch_forks() {
    process_gate();
    // late, so that fork calls it before handlers that lock what sections use
    static const int status = ::pthread_atfork(before_fork, after_fork, after_fork_in_child);
    static_cast<void>(status);  // without memory for handlers, a fork does not wait
}

unforked_section::unforked_section() {
    gate& each = process_gate();
    std::unique_lock lock(each.mutex);
    each.changed.wait(lock, [&] { return !each.is_pending; });
    ++each.sections;
}

unforked_section::~unforked_section() {
    gate& each = process_gate();
    {
        const std::scoped_lock lock(each.mutex);
        --each.sections;
    }
    each.changed.notify_all();
}

bool is_fork_pending() noexcept {
    return process_gate().is_pending.load(std::memory_order_relaxed);
}

}  // namespace pinflow::detail
