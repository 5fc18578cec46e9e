#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "pinflow/device.hpp"

namespace pinflow {

class event;
class stream;

namespace detail {

/// A stream for synchronous calls: on the host device, the thread that enqueues work runs it.
/// @throws device_error or system_failure.
stream synchronous_stream(pinflow::device device);

/// The stream of a pinflow::stream. Device buffers share it, because their memory is released in its order.
class shared_stream : public std::enable_shared_from_this<shared_stream> {
 public:
    /// Owns `native_handle`, a stream that the backend of `device` made.
    shared_stream(pinflow::device device, void* native_handle) noexcept;
    shared_stream(const shared_stream&) = delete;
    shared_stream& operator=(const shared_stream&) = delete;
    /// Does not wait for the enqueued work, which still runs to its end.
    ~shared_stream();

    const pinflow::device& device() const noexcept { return device_; }
    void* native_handle() const noexcept { return native_handle_; }

 private:
    pinflow::device device_;
    void* native_handle_;
};

}  // namespace detail

/// A borrowed stream: an ordered queue of work on one device. Copyable and small; the stream must outlive it.
/// Work may be enqueued from several threads. On CUDA, enqueuing blocks while the stream's queue is full.
class stream_view {
 public:
    /// A view of an existing stream of `device`, given by its native handle (a cudaStream_t; see
    /// pinflow/cuda.hpp).
    stream_view(pinflow::device device, void* native_handle) noexcept
        : device_(device), native_handle_(native_handle) {}

    const pinflow::device& device() const noexcept { return device_; }
    void* native_handle() const noexcept { return native_handle_; }

    /// Makes work enqueued from now on start only after `event`'s last record so far. Later records, or
    /// destroying the event, change nothing. Does not wait for the event.
    /// @throws invalid_argument for an event of another kind of device; device_error.
    void wait(const event& event) const;
    /// Returns when all work enqueued so far has finished.
    /// @throws device_error if any of it failed.
    void synchronize() const;
    /// Whether all work enqueued so far has finished; never waits.
    /// @throws device_error if any of it failed.
    bool done() const;
    /// Enqueues `work`, which a host thread runs once all earlier work has finished; later work waits for it.
    /// `work` must not throw, must not call CUDA, and must not wait for this stream. Objects that it refers
    /// to must live until it has run. Does not wait for it to run. For computing on batches of the host
    /// device, and for tests: on CUDA it stalls the stream for some ten microseconds.
    /// @throws device_error.
    void host_function_async(std::function<void()> work) const;

 private:
    friend class stream;
    friend class device_buffer;
    explicit stream_view(detail::shared_stream& owned) noexcept
        : device_(owned.device()), native_handle_(owned.native_handle()), owned_(&owned) {}

    pinflow::device device_;
    void* native_handle_;
    detail::shared_stream* owned_ = nullptr;  ///< null for a foreign stream
};

/// Owns a stream, which does not synchronise with CUDA's legacy default stream. Move-only; the destructor
/// waits for the enqueued work, and so does assignment for the stream that it replaces. On a moved-from
/// stream, all members but `device` throw invalid_argument.
class stream {
 public:
    explicit stream(pinflow::device device);
    stream(stream&& other) noexcept = default;
    stream& operator=(stream&& other) noexcept;
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;
    ~stream();

    operator stream_view() const { return view(); }
    stream_view view() const {
        if (!owned_) refuse_moved_from();
        return stream_view(*owned_);
    }
    const pinflow::device& device() const noexcept { return device_; }
    /// Keeps the stream alive, also after this object has been destroyed. Destroying the result does not
    /// wait.
    std::shared_ptr<const void> share() const {
        if (!owned_) refuse_moved_from();
        return owned_;
    }
    /// The members below are as in stream_view.
    void wait(const event& event) const { view().wait(event); }
    void synchronize() const { view().synchronize(); }
    bool done() const { return view().done(); }
    void host_function_async(std::function<void()> work) const {
        view().host_function_async(std::move(work));
    }

 private:
    friend stream detail::synchronous_stream(pinflow::device device);
    explicit stream(std::shared_ptr<detail::shared_stream> owned) noexcept;
    [[noreturn]] static void refuse_moved_from();

    pinflow::device device_;
    std::shared_ptr<detail::shared_stream> owned_;
};

/// A mark in a stream that host threads and other streams can wait for. Move-only. One thread at a time may
/// record it; waiting is safe from any thread. An event that was never recorded counts as done. A moved-from
/// event has no native handle: recording it, waiting for it and `done` throw invalid_argument.
class event {
 public:
    explicit event(pinflow::device device);
    event(event&& other) noexcept;
    event& operator=(event&& other) noexcept;
    event(const event&) = delete;
    event& operator=(const event&) = delete;
    ~event();

    const pinflow::device& device() const noexcept { return device_; }
    void* native_handle() const noexcept { return native_handle_; }

    /// Marks the work enqueued on `stream` so far, and replaces the previous mark. Does not wait for that
    /// work. The stream may be destroyed afterwards.
    /// @throws invalid_argument if the stream belongs to another device; device_error.
    void record(stream_view stream);
    /// Returns when the last mark has been passed.
    /// @throws device_error.
    void synchronize() const;
    /// The same, but gives up after `timeout`. On CUDA this may take some 0.1 ms longer.
    /// @return whether the mark has been passed.
    /// @throws device_error.
    bool synchronize_for(std::chrono::microseconds timeout) const;
    /// Whether the last mark has been passed; never waits.
    /// @throws device_error.
    bool done() const;

 private:
    friend class stream_view;
    void* valid_handle() const;

    pinflow::device device_;
    void* native_handle_;
};

}  // namespace pinflow
