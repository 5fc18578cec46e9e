#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pinflow::detail {

/// One record of an event in a stream: passed or not yet. Shared by the event and by the work it was recorded
/// in, so that an event may be destroyed, or recorded elsewhere, at any time.
class host_mark {
 public:
    /// Called by the stream when it has come here.
    void pass();
    bool passed() const;
    void wait() const;
    /// @return whether the mark was passed within `timeout`.
    bool wait_for(std::chrono::microseconds timeout) const;
    /// Keeps `object` alive until the mark has been passed.
    void keep_until_passed(std::shared_ptr<void> object);

 private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    bool passed_ = false;
    std::vector<std::shared_ptr<void>> kept_;
};

/// An ordered queue of work with a thread of its own: what a stream is on the host.
class host_stream {
 public:
    host_stream();
    host_stream(const host_stream&) = delete;
    host_stream& operator=(const host_stream&) = delete;
    /// Runs what is enqueued, then ends. Not to be called in a forked process.
    ~host_stream();
    /// Whether this is a process forked after the stream was made, which has no such thread.
    bool forked() const noexcept;

    /// `work` must not throw. @throws device_error in a process forked after the stream was made.
    void enqueue(std::function<void()> work);
    /// Passes `mark` behind the work enqueued so far: at once if all of that has finished, without waking the
    /// stream's thread. @throws as enqueue.
    void record(std::shared_ptr<host_mark> mark);
    /// Waits for all work enqueued before the call.
    void synchronize();
    bool done();

 private:
    void run();

    const ::pid_t owner_;
    std::mutex mutex_;
    std::condition_variable work_or_stop_;
    std::condition_variable progress_;
    std::deque<std::function<void()>> queue_;
    std::uint64_t enqueued_ = 0;
    std::uint64_t finished_ = 0;
    bool stop_ = false;
    std::thread thread_;  // last: it uses everything above
};

/// An event: its last mark. Safe to use from any thread.
class host_event {
 public:
    /// `mark` is the last one from now on.
    void set_last_mark(std::shared_ptr<host_mark> mark);
    /// Null when there is none.
    std::shared_ptr<host_mark> last_mark() const;

 private:
    mutable std::mutex mutex_;
    std::shared_ptr<host_mark> last_;
};

}  // namespace pinflow::detail
