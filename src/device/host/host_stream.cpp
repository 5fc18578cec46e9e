#include "src/device/host/host_stream.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

host_stream::host_stream()
    : owner_(::getpid()),
      thread_(system::start_thread("runs the work of a host stream", [this] { run(); })) {}

void host_stream::end(host_stream* stream) noexcept {
    std::unique_lock lock(stream->mutex_);
    stream->stop_ = true;
    stream->destroys_itself_ = stream->finished_ != stream->enqueued_;
    if (stream->destroys_itself_) {
        stream->thread_.detach();
        return;  // the thread looks at `stop_` after its work
    }
    lock.unlock();
    stream->work_or_stop_.notify_one();
    stream->thread_.join();
    delete stream;
}

bool host_stream::forked() const noexcept {
    return ::getpid() != owner_;
}

void host_stream::check_process(const char* what) const {
    if (!forked()) return;
    throw device_error(fmt::format(
        "cannot {} a stream of the host device in a forked process: its thread exists in the parent only",
        what));
}

void host_stream::enqueue(std::function<void()> work) {
    check_process("enqueue work on");
    {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(work));
        ++enqueued_;
    }
    work_or_stop_.notify_one();
}

void host_stream::record(std::shared_ptr<host_mark> mark) {
    if (!forked()) {
        const std::lock_guard lock(mutex_);
        if (finished_ == enqueued_) return mark->pass();
    }
    enqueue([mark = std::move(mark)] { mark->pass(); });
}

void host_stream::synchronize() {
    check_process("wait for");
    std::unique_lock lock(mutex_);
    const std::uint64_t target = enqueued_;
    progress_.wait(lock, [&] { return finished_ >= target; });
}

bool host_stream::done() {
    check_process("query");
    const std::lock_guard lock(mutex_);
    return finished_ == enqueued_;
}

void host_stream::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_or_stop_.wait(lock, [&] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) break;
        std::function<void()> work = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        work();
        work = nullptr;  // destroyed before the work counts as finished
        lock.lock();
        ++finished_;
        progress_.notify_all();
    }
    if (!destroys_itself_) return;
    lock.unlock();
    delete this;
}

void host_mark::pass() {
    decltype(kept_) dropped;  // destroyed after the lock is released
    const std::lock_guard lock(mutex_);
    passed_ = true;
    dropped.swap(kept_);
    changed_.notify_all();
}

bool host_mark::passed() const {
    const std::lock_guard lock(mutex_);
    return passed_;
}

void host_mark::wait() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return passed_; });
}

bool host_mark::wait_for(std::chrono::microseconds timeout) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [&] { return passed_; });
}

void host_mark::keep_until_passed(std::shared_ptr<void> object) {
    const std::lock_guard lock(mutex_);
    if (!passed_) kept_.push_back(std::move(object));
}

void host_event::set_last_mark(std::shared_ptr<host_mark> mark) {
    const std::lock_guard lock(mutex_);
    last_.swap(mark);
}

std::shared_ptr<host_mark> host_event::last_mark() const {
    const std::lock_guard lock(mutex_);
    return last_;
}

}  // namespace pinflow::detail
