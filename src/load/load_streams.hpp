#pragma once

#include <optional>

#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// A stream of the host device for all loads of the process: a stream of its own would cost each load a
/// thread. Memory is freed in its order, and nothing waits for it.
stream_view load_host_stream();

/// The stream in whose order memory is freed after a load; it is never destroyed. If the memory were freed in
/// the order of the load's own stream, every tensor that is loaded by itself would keep a stream alive.
stream_view load_release_stream(const device& device);

/// A stream for the copies of one load. On a GPU it is one that the process keeps, as making one takes longer
/// than a small load; on the host device load_host_stream.
class load_stream {
 public:
    /// @throws device_error.
    explicit load_stream(const device& device);
    load_stream(const load_stream&) = delete;
    load_stream& operator=(const load_stream&) = delete;
    /// Waits for its work, and keeps it for other loads unless the device has failed.
    ~load_stream();

    stream_view view() const noexcept { return view_; }

 private:
    std::optional<stream> own_;  ///< not on the host device
    stream_view view_;
};

}  // namespace pinflow::detail
