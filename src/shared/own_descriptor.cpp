#include "src/shared/own_descriptor.hpp"

#include <pthread.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

/// All descriptors of this process that its children must not have.
class registry {
 public:
    static registry& process() {
        static registry* const only = new registry;  // never destroyed: threads may outlive main
        return *only;
    }

    struct added {
        int descriptor;
        std::uint64_t fork_count;
    };
    added add(const std::function<int()>& open) {
        const std::lock_guard lock(mutex_);
        const int descriptor = open();
        try {
            descriptors_.insert(descriptor);
        } catch (...) {
            system::close(descriptor);
            throw;
        }
        return {descriptor, fork_count_};
    }

    /// @param fork_count that of `add`. A child made by fork has closed the descriptors of its parent
    /// already, and may have opened others with the same numbers.
    void close(int descriptor, std::uint64_t fork_count) noexcept {
        const std::lock_guard lock(mutex_);
        if (fork_count != fork_count_) return;
        descriptors_.erase(descriptor);
        system::close(descriptor);
    }

 private:
    registry() {
        const int status = ::pthread_atfork([] { process().mutex_.lock(); },
                                            [] { process().mutex_.unlock(); }, [] { process().close_all(); });
        if (status != 0) throw std::bad_alloc();
    }

    /// Runs in a child made by fork, which begins with the mutex locked.
    void close_all() noexcept {
        for (const int descriptor : descriptors_)
            ::close(descriptor);
        descriptors_.clear();
        ++fork_count_;
        mutex_.unlock();
    }

    std::mutex mutex_;
    std::set<int> descriptors_;
    std::uint64_t fork_count_ = 0;  ///< forks from the first process to this one
};

}  // namespace

own_descriptor::own_descriptor(const std::function<int()>& open) {
    const registry::added added = registry::process().add(open);
    descriptor_ = added.descriptor;
    fork_count_ = added.fork_count;
}

own_descriptor::own_descriptor(own_descriptor&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), fork_count_(other.fork_count_) {}

own_descriptor::~own_descriptor() {
    if (descriptor_ != -1) registry::process().close(descriptor_, fork_count_);
}

}  // namespace pinflow::detail
