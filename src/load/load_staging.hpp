#pragma once

#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// A page-locked buffer of load_unit_bytes, and the event after its last copy.
struct load_buffer {
    explicit load_buffer(const pinflow::device& device);

    pinned_buffer host;
    event copied;
};

/// Two staging buffers for one thread, of those that the process keeps for loads: page-locking new ones takes
/// longer than filling them. The process keeps at most kept_count of them for each device, until it ends.
class load_buffers {
 public:
    static constexpr std::size_t kept_count = 40;

    /// @throws device_error if memory cannot be page-locked.
    explicit load_buffers(const pinflow::device& device);
    load_buffers(const load_buffers&) = delete;
    load_buffers& operator=(const load_buffers&) = delete;
    /// All copies from the buffers must have finished.
    ~load_buffers();

    /// The buffer that was used less recently; waits until its last copy has finished.
    load_buffer& next();

 private:
    pinflow::device device_;
    std::vector<load_buffer> buffers_;
    std::size_t next_ = 0;
};

}  // namespace pinflow::detail
