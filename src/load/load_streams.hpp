#pragma once

#include <optional>

#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// A stream of the host device for all loads of the process: a stream of its own would cost each load a
/// thread. Memory is freed in its order, and nothing waits for it.
stream_view load_host_stream();

/// The stream in whose order memory is freed after a load; it is never destroyed. Not the load's own stream:
/// later loads use that, and the memory would wait for their copies.
stream_view load_release_stream(const device& device);

/// The stream for the copies of one load. On a GPU it comes from a pool of the process. On the host device it
/// is load_host_stream.
class load_stream {
 public:
    /// @throws device_error.
    explicit load_stream(const device& device);
    load_stream(const load_stream&) = delete;
    load_stream& operator=(const load_stream&) = delete;
    /// Waits for the work of the stream, and returns it to the pool, unless the device has failed or the pool
    /// has 8 streams for it.
    ~load_stream();

    stream_view view() const noexcept { return view_; }

 private:
    std::optional<stream> own_;  ///< not on the host device
    stream_view view_;
};

}  // namespace pinflow::detail
