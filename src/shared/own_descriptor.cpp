#include "src/shared/own_descriptor.hpp"

#include <pthread.h>
#include <unistd.h>

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

    int add(const std::function<int()>& open) {
        const std::lock_guard lock(mutex_);
        const int descriptor = open();
        try {
            descriptors_.insert(descriptor);
        } catch (...) {
            system::close(descriptor);
            throw;
        }
        return descriptor;
    }

    void close(int descriptor) noexcept {
        const std::lock_guard lock(mutex_);
        // a child made by fork has closed it already
        if (descriptors_.erase(descriptor) != 0) system::close(descriptor);
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
        mutex_.unlock();
    }

    std::mutex mutex_;
    std::set<int> descriptors_;
};

}  // namespace

own_descriptor::own_descriptor(const std::function<int()>& open)
    : descriptor_(registry::process().add(open)) {}

own_descriptor::own_descriptor(own_descriptor&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

own_descriptor::~own_descriptor() {
    if (descriptor_ != -1) registry::process().close(descriptor_);
}

}  // namespace pinflow::detail
