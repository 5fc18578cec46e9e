#include "src/device/pin_worker.hpp"

#include <unistd.h>

#include <utility>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

pin_worker::machine_answers pin_worker::this_machine() {
    return {read_memory_limits(), read_own_maps()};
}

pin_worker::pin_worker(const std::vector<pin_range>& ranges, std::string reason) : process_(::getpid()) {
    std::vector<pin_range> unowned;  // nothing is registered, so nothing needs to stay mapped
    for (const pin_range& range : ranges)
        unowned.push_back({range.bytes, range.description, nullptr});
    job_ = std::make_shared<pin_job>(std::move(unowned), std::move(reason));
}

pin_worker::pin_worker(std::vector<pin_range> ranges, page_locker& locker, pin_registry& registry,
                       const pin_options& options, ask_machine ask)
    : job_(std::make_shared<pin_job>(std::move(ranges), locker, registry, options, ask)),
      process_(::getpid()) {
    try {
        thread_ = system::start_thread("registers pages", [job = job_] { job->run(); });
    } catch (const system_failure& failure) {
        job_->refuse(failure.what());
    }
}

pin_worker::~pin_worker() {
    if (!thread_.joinable()) return;
    if (::getpid() != process_) {
        // the thread exists only in the parent: it cannot be joined, and pages cannot be unregistered
        thread_.detach();
        static_cast<void>(new std::shared_ptr<pin_job>(job_));
        return;
    }
    job_->stop();
    bool returned = job_->wait_for_run();
    if (returned && job_->holds_pages()) {
        thread_.join();
        // unregistering can hang as well, for instance behind another holder's registration
        try {
            thread_ = system::start_thread("unregisters pages", [job = job_] { job->release(); });
            returned = job_->wait_for_release();
        } catch (const system_failure&) {
            job_->release();
        }
    }
    if (!thread_.joinable()) return;
    if (returned) {
        thread_.join();
    } else {
        thread_.detach();
    }
}

}  // namespace pinflow::detail
