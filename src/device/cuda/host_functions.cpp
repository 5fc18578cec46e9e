#include "src/device/cuda/host_functions.hpp"

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "src/core/system.hpp"

namespace pinflow::detail::cuda {

cudaError_t host_functions::enqueue(std::function<void()> work, cudaStream_t stream) {
    auto owned = std::make_unique<task>(task{this, std::move(work), take_flag()});
    const flag done = owned->done;
    const std::lock_guard lock(mutex_of(stream));
    return context_.run([&] {
        const cudaError_t status = launch_host_function(stream, hand_over, owned.get());
        if (status != cudaSuccess) {
            const std::lock_guard flags_lock(mutex_);
            free_flags_.push_back(done);
            return status;
        }
        owned.release();  // NOLINT(bugprone-unused-return-value): run_tasks owns it now
        const cudaError_t waiting = stream_wait_value(stream, done.word, done.next);
        // after a failure, the caller may free what the function uses, so wait for it; on a broken device it
        // may never run
        if (waiting != cudaSuccess && !is_fatal(waiting)) {
            const std::atomic_ref<std::uint32_t> word(*done.word);
            while (word.load(std::memory_order_acquire) < done.next)
                std::this_thread::yield();
        }
        return waiting;
    });
}

std::mutex& host_functions::mutex_of(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    return enqueue_mutexes_[stream];
}

void host_functions::reserve() {
    constexpr std::size_t enough = 512;
    {
        const std::lock_guard lock(mutex_);
        if (free_flags_.size() >= enough) return;
    }
    add_flags();
}

host_functions::flag host_functions::take_flag() {
    for (;;) {
        {
            const std::lock_guard lock(mutex_);
            if (!free_flags_.empty()) {
                const flag taken = free_flags_.back();
                free_flags_.pop_back();
                return taken;
            }
        }
        add_flags();
    }
}

/// Takes flags from pinned memory, a page at a time. The allocation runs without the lock, because CUDA may
/// wait for a host function that needs the lock in `give_task`.
void host_functions::add_flags() {
    constexpr std::size_t page_bytes = 4096;
    auto* const words = reinterpret_cast<std::uint32_t*>(memory_.allocate(page_bytes));
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < page_bytes / sizeof(std::uint32_t); ++i)
        free_flags_.push_back({words + i, 1});
}

void host_functions::hand_over(void* data) noexcept {
    auto* const ready = static_cast<task*>(data);
    ready->owner->give_task(ready);
}

void host_functions::give_task(task* ready) {
    bool another_thread = false;
    {
        const std::lock_guard lock(mutex_);
        ready_.push_back(ready);
        another_thread = ready_.size() > idle_threads_;
    }
    changed_.notify_one();
    if (!another_thread) return;
    try {
        // a function may wait, so each one needs its own thread
        system::start_thread("runs host functions of streams", [this] { run_tasks(); }).detach();
        const std::lock_guard lock(mutex_);
        ++threads_;
    } catch (...) {
        // an existing thread takes the task later; if there is none, it runs on CUDA's thread, which must not
        // call CUDA
        std::unique_lock lock(mutex_);
        if (threads_ == 0 && !ready_.empty()) run_task(lock);
    }
}

void host_functions::run_tasks() {
    std::unique_lock lock(mutex_);
    for (;;) {
        ++idle_threads_;
        changed_.wait(lock, [&] { return !ready_.empty(); });
        --idle_threads_;
        run_task(lock);
    }
}

/// Runs the next task. Releases the lock while it runs.
void host_functions::run_task(std::unique_lock<std::mutex>& lock) {
    std::unique_ptr<task> taken(ready_.front());
    ready_.pop_front();
    lock.unlock();
    [&]() noexcept { taken->work(); }();
    flag done = taken->done;
    taken.reset();  // destroyed before the stream continues
    std::atomic_ref<std::uint32_t>(*done.word).store(done.next, std::memory_order_release);
    ++done.next;
    lock.lock();
    free_flags_.push_back(done);
}

}  // namespace pinflow::detail::cuda
