#pragma once

#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// A stream of the host device for all loads of the process: a stream of its own would cost each load a
/// thread. Memory is freed in its order, and nothing waits for it.
stream_view load_host_stream();

/// The stream in whose order memory is freed after a load; it is never destroyed. If the memory were freed in
/// the order of the load's own stream, every tensor that is loaded by itself would keep a stream alive.
stream_view load_release_stream(const device& device);

}  // namespace pinflow::detail
