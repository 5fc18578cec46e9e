#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "src/device/cuda/context.hpp"
#include "src/device/cuda/pinned_memory.hpp"

namespace pinflow::detail::cuda {

/// Runs functions on host threads in a stream's order. CUDA may run all host functions on one thread, so a
/// function that waits would block the functions of all other streams. Here CUDA's host function only hands
/// `work` to a thread of our own. The stream waits for a word in pinned memory, which that thread writes
/// afterwards. Thread-safe. Never destroyed, because its threads never end.
class host_functions {
 public:
    /// Takes its flags from `memory`.
    host_functions(const context& context, pinned_memory& memory) : context_(context), memory_(memory) {}
    host_functions(const host_functions&) = delete;
    host_functions& operator=(const host_functions&) = delete;

    /// Allocates flags ahead, so that `enqueue` allocates none for the next 512 functions.
    /// @throws device_error if there is no pinned memory for them.
    void reserve();
    /// Runs `work` once `stream` has completed the work enqueued so far. Later work on the stream waits for
    /// it. If this throws or returns an error, `work` has ended or never runs, unless the device has failed
    /// for good.
    /// @throws device_error if there is no pinned memory for a flag.
    [[nodiscard]] cudaError_t enqueue(std::function<void()> work, cudaStream_t stream);

 private:
    /// A word that streams wait for. It only counts up, so that it can be reused as soon as it is written.
    struct flag {
        std::uint32_t* word;
        std::uint32_t next;
    };
    struct task {
        host_functions* owner;
        std::function<void()> work;
        flag done;
    };

    std::mutex& mutex_of(cudaStream_t stream);
    static void hand_over(void* data) noexcept;
    flag take_flag();
    void add_flags();
    void give_task(task* ready);
    void run_tasks();
    void run_task(std::unique_lock<std::mutex>& lock);

    const context& context_;
    pinned_memory& memory_;
    std::mutex mutex_;  // guards all members below
    /// Held while a function and the stream's wait for it are enqueued, so that no other function comes
    /// between them.
    /// One mutex per stream: a thread that enqueues on a full stream blocks until the stream continues. It
    /// must not block threads that use other streams. A later stream at the same address reuses the mutex.
    std::map<cudaStream_t, std::mutex> enqueue_mutexes_;
    std::condition_variable changed_;
    std::vector<flag> free_flags_;
    std::deque<task*> ready_;
    std::size_t threads_ = 0;
    std::size_t idle_threads_ = 0;
};

}  // namespace pinflow::detail::cuda
