#pragma once

#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// A stream of the host device for all loads of the process: a stream of its own would cost each load a
/// thread. Memory is freed in its order, and nothing waits for it.
stream_view load_host_stream();

/// A stream in whose order memory is freed after a load, never destroyed. With its own stream, each tensor
/// that is loaded by itself would keep one alive.
stream_view load_release_stream(const device& device);

}  // namespace pinflow::detail
