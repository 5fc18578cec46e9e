#include "src/load/load_threads.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// More than a call from Python takes between two loads.
constexpr std::chrono::microseconds spin_time{200};
/// Then the thread ends, because other work may need it under the system's limit.
constexpr std::chrono::milliseconds max_idle_time{100};
constexpr std::size_t max_idle = 16;

using done_flag = std::shared_ptr<std::atomic<bool>>;

/// A thread of loads, which deletes this when it ends.
struct kept_thread {
    std::function<void()> work;
    done_flag is_done;
    std::mutex mutex;
    std::condition_variable woken;
    std::atomic<bool> has_work = false;  ///< written with `mutex` held
    ::cpu_set_t cores{};                 ///< on which it may run, as the thread that started it
};

/// The cores on which the calling thread may run. Empty if there are too many of them.
::cpu_set_t cores_of_caller() noexcept {
    ::cpu_set_t cores;
    CPU_ZERO(&cores);
    if (::sched_getaffinity(0, sizeof cores, &cores) != 0) CPU_ZERO(&cores);
    return cores;
}

/// The kept threads without work. Never destroyed, as they may outlast static destructors.
struct idle_threads {
    ::pid_t process = ::getpid();
    std::mutex mutex;
    std::vector<kept_thread*> threads;

    idle_threads() { threads.reserve(max_idle); }

    static idle_threads& of_process() {
        static std::atomic<idle_threads*> current = nullptr;
        idle_threads* known = current;
        while (known == nullptr ||
               known->process != ::getpid()) {  // a forked process has none of the threads
            auto made = std::make_unique<idle_threads>();
            if (current.compare_exchange_strong(known, made.get())) return *made.release();
        }
        return *known;
    }

    /// The last one that may run on these cores; null if there is none.
    kept_thread* take(const ::cpu_set_t& cores) {
        const std::scoped_lock lock(mutex);
        const auto last = std::find_if(threads.rbegin(), threads.rend(), [&](const kept_thread* each) {
            return CPU_EQUAL(&each->cores, &cores) != 0;
        });
        if (last == threads.rend()) return nullptr;
        kept_thread* const taken = *last;
        threads.erase(std::next(last).base());
        return taken;
    }
    bool add(kept_thread* added) noexcept {
        const std::scoped_lock lock(mutex);
        if (threads.size() == max_idle) return false;
        threads.push_back(added);
        return true;
    }
    /// @return false if it has been taken.
    bool remove(kept_thread* removed) noexcept {
        const std::scoped_lock lock(mutex);
        return std::erase(threads, removed) != 0;
    }
};

/// Waits for work. @return false if there has been none for some time; the thread is then not idle any more.
bool wait_for_work(kept_thread& self, idle_threads& idle) noexcept {
    const auto spin_end = clock::now() + spin_time;
    while (!self.has_work && clock::now() < spin_end)
        std::this_thread::yield();
    const auto has_work = [&] { return self.has_work.load(); };
    std::unique_lock lock(self.mutex);
    if (!self.woken.wait_for(lock, max_idle_time, has_work)) {
        lock.unlock();
        if (idle.remove(&self)) return false;
        lock.lock();
        self.woken.wait(lock, has_work);
    }
    self.has_work = false;
    return true;
}

void run(kept_thread* self, idle_threads& idle) noexcept {
    for (;;) {
        self->work();
        const done_flag is_done = std::move(self->is_done);
        // a test's hook decides about each thread
        const bool is_kept = !system::hook_is_installed() && idle.add(self);
        *is_done = true;  // the next load may follow at once, and finds this thread
        is_done->notify_all();
        if (!is_kept || !wait_for_work(*self, idle)) {
            delete self;
            return;
        }
    }
}

}  // namespace

load_thread::load_thread(std::function<void()> work) {
    auto is_done = std::make_shared<std::atomic<bool>>(false);
    idle_threads& idle = idle_threads::of_process();
    const ::cpu_set_t cores = cores_of_caller();
    if (kept_thread* const idle_thread = system::hook_is_installed() ? nullptr : idle.take(cores)) {
        idle_thread->work = std::move(work);
        idle_thread->is_done = is_done;
        const std::scoped_lock lock(idle_thread->mutex);  // until it has been notified, as it may end at once
        idle_thread->has_work = true;
        idle_thread->woken.notify_one();
    } else {
        auto made = std::make_unique<kept_thread>();
        made->work = std::move(work);
        made->is_done = is_done;
        made->cores = cores;
        system::start_thread("loads tensors", [self = made.get(), &idle] { run(self, idle); }).detach();
        static_cast<void>(made.release());
    }
    is_done_ = std::move(is_done);
}

void load_thread::join() const noexcept {
    if (is_done_) is_done_->wait(false);
}

}  // namespace pinflow::detail
