#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail::system {

namespace {

using clock = std::chrono::steady_clock;

/// Threads that stay until all have started.
struct trial {
    explicit trial(unsigned max_count) {
        ids.reserve(max_count);
        threads.reserve(max_count);
    }
    trial(const trial&) = delete;
    trial& operator=(const trial&) = delete;
    ~trial() { end(); }

    void end() noexcept {
        {
            const std::lock_guard lock(mutex);
            is_over = true;
        }
        changed.notify_all();
        for (; !threads.empty(); threads.pop_back())
            ::pthread_join(threads.back(), nullptr);
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::vector<::pid_t> ids;
    std::vector<::pthread_t> threads;
    bool is_over = false;
};

void* take_part(void* shared) {
    auto& all = *static_cast<trial*>(shared);
    std::unique_lock lock(all.mutex);
    all.ids.push_back(::gettid());  // reserved before
    all.changed.wait(lock, [&] { return all.is_over; });
    return nullptr;
}

/// Waits until the kernel has released a joined thread, which counts against the cgroup's limit for some
/// microseconds longer.
void wait_until_released(::pid_t id, clock::time_point deadline) {
    const std::string entry = fmt::format("/proc/self/task/{}", id);
    while (::access(entry.c_str(), F_OK) == 0 && clock::now() < deadline)
        std::this_thread::yield();
}

[[noreturn]] void fail_to_start(std::string_view purpose, const std::error_code& code) {
    throw system_failure(fmt::format("cannot start a thread that {}: {}; raise ulimit -u, ulimit -v or "
                                     "the limit of the pids cgroup",
                                     purpose, code.message()),
                         code);
}

}  // namespace

std::thread start_thread(std::string_view purpose, std::function<void()> work) {
    try {
        fail_if_injected(call::start_thread, {}, "a test refuses the thread");
    } catch (const system_failure& refused) {
        fail_to_start(purpose, refused.code());
    }
    try {
        return std::thread(std::move(work));
    } catch (const std::system_error& failure) {
        fail_to_start(purpose, failure.code());
    }
}

unsigned count_startable_threads(unsigned wanted, std::size_t stack_bytes) {
    trial all(wanted);
    ::pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstacksize(&attributes, stack_bytes);
    while (all.threads.size() < wanted) {
        try {
            fail_if_injected(call::start_thread, {}, "a test refuses the thread");
        } catch (const system_failure&) {
            break;
        }
        ::pthread_t thread{};
        if (::pthread_create(&thread, &attributes, take_part, &all) != 0) break;
        all.threads.push_back(thread);
    }
    ::pthread_attr_destroy(&attributes);
    const auto count = static_cast<unsigned>(all.threads.size());
    all.end();
    const clock::time_point deadline = clock::now() + std::chrono::milliseconds(100);
    for (const ::pid_t id : all.ids)
        wait_until_released(id, deadline);
    return count;
}

}  // namespace pinflow::detail::system
