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

/// One recording of an event in a stream, passed or not yet. Shared by the event and the stream's work, so
/// that an event may be destroyed or recorded elsewhere at any time.
class host_mark {
 public:
    /// Called by the stream when it reaches the mark.
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

/// The host's stream: an ordered queue of work. The work runs on a thread of the stream, or on the thread
/// that enqueues it, one function at a time.
class host_stream {
 public:
    enum class runs_on : std::uint8_t { own_thread, caller };
    explicit host_stream(runs_on where);
    host_stream(const host_stream&) = delete;
    host_stream& operator=(const host_stream&) = delete;
    /// Destroys the stream once the enqueued work has run. Does not wait for that work: if some is
    /// left, the thread that runs it destroys the stream after it. Must not be called in a forked process.
    static void end(host_stream* stream) noexcept;
    /// Whether this process was forked after the stream was made, and so may lack its thread.
    bool forked() const noexcept;

    /// Enqueues `work`, which must not throw. If callers run the work, returns once it has finished; the work
    /// must not use this stream then.
    /// @throws device_error in a process forked after the stream was made.
    void enqueue(std::function<void()> work);
    /// Passes `mark` after the work enqueued so far. If that work has finished, the mark passes at once,
    /// without waking the stream's thread.
    /// @throws as enqueue.
    void record(std::shared_ptr<host_mark> mark);
    /// Waits for all work enqueued before the call.
    /// @throws as enqueue.
    void synchronize();
    /// @throws as enqueue.
    bool done();

 private:
    ~host_stream() = default;
    /// @throws device_error in a process forked after the stream was made.
    void check_process(const char* what) const;
    void run();
    void run_on_caller(std::function<void()> work);

    const ::pid_t owner_;
    const runs_on where_;
    std::mutex caller_mutex_;  ///< held by the caller whose work runs
    std::mutex mutex_;
    std::condition_variable work_or_stop_;
    std::condition_variable progress_;
    std::deque<std::function<void()>> queue_;
    std::uint64_t enqueued_ = 0;
    std::uint64_t finished_ = 0;
    bool stop_ = false;
    bool destroys_itself_ = false;
    std::thread thread_;  // last: it uses everything above. Not started if callers run the work
};

/// An event, as its last mark. Thread-safe.
class host_event {
 public:
    /// Makes `mark` the last one.
    void set_last_mark(std::shared_ptr<host_mark> mark);
    /// Null if the event was never recorded.
    std::shared_ptr<host_mark> last_mark() const;

 private:
    mutable std::mutex mutex_;
    std::shared_ptr<host_mark> last_;
};

}  // namespace pinflow::detail
