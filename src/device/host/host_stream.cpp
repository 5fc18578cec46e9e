#include "src/device/host/host_stream.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

host_stream::host_stream(runs_on where) : owner_(::getpid()), where_(where) {
    if (where == runs_on::own_thread)
        thread_ = system::start_thread("runs the work of a host stream", [this] { run(); });
}

void host_stream::end(host_stream* stream) noexcept {
    std::unique_lock lock(stream->mutex_);
    stream->stop_ = true;
    stream->destroys_itself_ = stream->finished_ != stream->enqueued_;
    if (stream->destroys_itself_) {
        // whoever runs the last work destroys the stream
        if (stream->where_ == runs_on::own_thread) stream->thread_.detach();
        return;
    }
    lock.unlock();
    stream->work_or_stop_.notify_one();
    if (stream->where_ == runs_on::own_thread) stream->thread_.join();
    delete stream;
}

bool host_stream::forked() const noexcept {
    return ::getpid() != owner_;
}

void host_stream::check_process(const char* what) const {
    if (!forked()) return;
    throw device_error(fmt::format(
        "cannot {} a stream of the host device in a forked process: the stream belongs to the parent process",
        what));
}

void host_stream::enqueue(std::function<void()> work) {
    check_process("enqueue work on");
    if (where_ == runs_on::caller) return run_on_caller(std::move(work));
    {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(work));
        ++enqueued_;
    }
    work_or_stop_.notify_one();
}

void host_stream::run_on_caller(std::function<void()> work) {
    {
        const std::lock_guard lock(mutex_);
        ++enqueued_;
    }
    const auto finish = [this]() noexcept {
        std::unique_lock lock(mutex_);
        ++finished_;
        progress_.notify_all();
        const bool is_last = destroys_itself_ && finished_ == enqueued_;
        lock.unlock();
        if (is_last) delete this;
    };
    try {
        const std::lock_guard running(caller_mutex_);
        // The caller may be a task. While it waits for tasks of `work`, it must not begin others, which could
        // wait for this stream. And if its group is cancelled, `work` must still run as a whole.
        tbb::task_group_context context(tbb::task_group_context::isolated);
        tbb::this_task_arena::isolate(
            [&] { tbb::parallel_for(0, 1, [&](int) { work(); }, tbb::simple_partitioner(), context); });
    } catch (...) {  // no memory for the task
        finish();
        throw;
    }
    work = nullptr;  // destroyed before the work counts as finished
    finish();
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
