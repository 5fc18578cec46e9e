#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "src/device/pin_job.hpp"

namespace pinflow::detail {

/// Implements pinned_pages. Owns the thread that registers and, later, the thread that unregisters. The
/// registry, the locker and `ask` are parameters, so that tests can replace them. All three must outlive the
/// threads, which may hang longer than the worker exists.
class pin_worker {
 public:
    using machine_answers = pin_job::machine_answers;
    using ask_machine = pin_job::ask_machine;
    static machine_answers this_machine();

    pin_worker(std::vector<pin_range> ranges, page_locker& locker, pin_registry& registry,
               const pin_options& options, ask_machine ask = &this_machine);
    /// Makes a worker that registers nothing, for this reason.
    pin_worker(const std::vector<pin_range>& ranges, std::string reason);
    ~pin_worker();
    pin_worker(const pin_worker&) = delete;
    pin_worker& operator=(const pin_worker&) = delete;

    bool covers(const std::byte* data, std::uint64_t size_bytes) const noexcept {
        return job_->tracker().covers(data, size_bytes);
    }
    bool may_cover(const std::byte* data, std::uint64_t size_bytes) const noexcept {
        return job_->tracker().covers(data, size_bytes) ||
               (!job_->finished() && job_->tracker().may_cover(data, size_bytes));
    }
    pin_run run_at(const std::byte* data, std::uint64_t size_bytes) const noexcept {
        return job_->tracker().run_at(data, size_bytes);
    }
    std::uint64_t registered_prefix_bytes() const noexcept {
        return job_->tracker().registered_prefix_bytes();
    }
    void set_reader_position(const std::byte* data) const noexcept { job_->set_reader_position(data); }
    bool finished() const noexcept { return job_->finished(); }
    bool all_registered() const noexcept { return job_->all_registered(); }
    bool wait() const { return job_->wait(); }
    bool wait_for(const std::byte* data, std::uint64_t size_bytes, std::chrono::nanoseconds timeout) const {
        return job_->wait_for(data, size_bytes, timeout);
    }
    pin_report report() const { return job_->report(); }

 private:
    std::shared_ptr<pin_job> job_;
    ::pid_t process_;
    std::thread thread_;
};

}  // namespace pinflow::detail
