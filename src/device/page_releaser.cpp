#include "src/device/page_releaser.hpp"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

class running_releases {
 public:
    running_releases() noexcept {
        // atexit functions run in reverse order: CUDA registered its own earlier, so CUDA still works in this
        // one
        static_cast<void>(std::atexit(&wait_for_released_pages));
    }

    void add() {
        const std::scoped_lock lock(mutex_);
        ++count_;
    }

    void remove() noexcept {
        const std::scoped_lock lock(mutex_);
        --count_;
        changed_.notify_all();
    }

    bool has_running() noexcept {
        if (::getpid() != process_) return false;
        const std::scoped_lock lock(mutex_);
        return count_ > 0;
    }

    void wait() {
        if (::getpid() != process_) return;  // a forked process has none of the threads
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return count_ == 0; });
    }

 private:
    const ::pid_t process_ = ::getpid();
    std::mutex mutex_;
    std::condition_variable changed_;
    unsigned count_ = 0;
};

std::atomic<running_releases*> made = nullptr;

/// Made when pages are first released: CUDA must have registered its atexit functions. Never destroyed:
/// threads may use it until the process ends.
running_releases& releases() {
    static running_releases& all = *new running_releases;
    made = &all;
    return all;
}

}  // namespace

void release_in_background(pinned_pages pages) noexcept {
    try {
        running_releases& all = releases();
        auto held = std::make_unique<pinned_pages>(std::move(pages));
        all.add();
        try {
            system::start_thread("releases pages", [pointer = held.get(), &all] {
                delete pointer;
                all.remove();
            }).detach();
            static_cast<void>(held.release());  // NOLINT(bugprone-unused-return-value): the thread deletes it
        } catch (const std::exception&) {
            held.reset();
            all.remove();
        }
    } catch (const std::exception&) {
        return;  // `pages`, or `held`, has unregistered them
    }
}

bool is_releasing_pages() noexcept {
    running_releases* const all = made;
    return all != nullptr && all->has_running();
}

void wait_for_released_pages() noexcept {
    if (running_releases* const all = made) all->wait();
}

}  // namespace pinflow::detail
