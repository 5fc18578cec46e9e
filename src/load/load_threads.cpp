#include "src/load/load_threads.hpp"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// More than a call from Python takes between two loads.
constexpr std::chrono::microseconds busy_time{200};
/// Other work may need the threads that the system allows.
constexpr std::chrono::milliseconds asleep_time{100};
constexpr std::size_t max_waiting = 16;

using done_flag = std::shared_ptr<std::atomic<bool>>;

/// Destroys itself.
struct worker {
    std::function<void()> work;
    done_flag is_done;
    std::mutex mutex;
    std::condition_variable woken;
    std::atomic<bool> has_work = false;  ///< set with the mutex
};

/// The workers that wait. Never destroyed, as they may outlast static destructors.
struct waiting_workers {
    ::pid_t process = ::getpid();
    std::mutex mutex;
    std::vector<worker*> workers;

    waiting_workers() { workers.reserve(max_waiting); }

    static waiting_workers& of_process() {
        static std::atomic<waiting_workers*> current = nullptr;
        waiting_workers* known = current;
        while (known == nullptr ||
               known->process != ::getpid()) {  // a forked process has none of the threads
            auto made = std::make_unique<waiting_workers>();
            if (current.compare_exchange_strong(known, made.get())) return *made.release();
        }
        return *known;
    }

    worker* take() {
        const std::scoped_lock lock(mutex);
        if (workers.empty()) return nullptr;
        worker* const last = workers.back();
        workers.pop_back();
        return last;
    }
    bool add(worker* added) noexcept {
        const std::scoped_lock lock(mutex);
        if (workers.size() == max_waiting) return false;
        workers.push_back(added);
        return true;
    }
    /// @return false if it has been taken.
    bool remove(worker* removed) noexcept {
        const std::scoped_lock lock(mutex);
        return std::erase(workers, removed) != 0;
    }
};

/// Waits for work. @return false if there has been none for some time; the worker is then not waiting any
/// more.
bool wait_for_work(worker& self, waiting_workers& waiting) noexcept {
    const auto busy_end = clock::now() + busy_time;
    while (!self.has_work && clock::now() < busy_end)
        std::this_thread::yield();
    const auto has_work = [&] { return self.has_work.load(); };
    std::unique_lock lock(self.mutex);
    if (!self.woken.wait_for(lock, asleep_time, has_work)) {
        lock.unlock();
        if (waiting.remove(&self)) return false;
        lock.lock();
        self.woken.wait(lock, has_work);
    }
    self.has_work = false;
    return true;
}

void run(worker* self, waiting_workers& waiting) noexcept {
    for (;;) {
        self->work();
        const done_flag is_done = std::move(self->is_done);
        // a test's hook decides about each thread
        const bool waits = !system::hook_is_installed() && waiting.add(self);
        *is_done = true;  // the next load may follow at once, and finds this worker
        is_done->notify_all();
        if (!waits || !wait_for_work(*self, waiting)) {
            delete self;
            return;
        }
    }
}

}  // namespace

load_thread::load_thread(std::function<void()> work) {
    auto is_done = std::make_shared<std::atomic<bool>>(false);
    waiting_workers& waiting = waiting_workers::of_process();
    if (worker* const waiter = system::hook_is_installed() ? nullptr : waiting.take()) {
        waiter->work = std::move(work);
        waiter->is_done = is_done;
        const std::scoped_lock lock(waiter->mutex);  // until it has been notified, as it may end at once
        waiter->has_work = true;
        waiter->woken.notify_one();
    } else {
        auto made = std::make_unique<worker>();
        made->work = std::move(work);
        made->is_done = is_done;
        system::start_thread("loads tensors", [self = made.get(), &waiting] { run(self, waiting); }).detach();
        static_cast<void>(made.release());
    }
    is_done_ = std::move(is_done);
}

void load_thread::join() const noexcept {
    if (is_done_) is_done_->wait(false);
}

}  // namespace pinflow::detail
