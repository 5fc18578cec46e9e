#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/loader/batch.hpp"
#include "pinflow/stream.hpp"

namespace pinflow {

namespace detail {
struct digest_array;
}

/// A checksum of delivered samples that does not depend on their order or on the batch size, so the digests
/// of shards and of resumed parts add up. It changes if words of a row are swapped, or if a sample gets the
/// row or label of another sample. Computed on the device, from the bytes of leased batches.
///
/// With G = 0x9E3779B97F4A7C15 and mix = splitmix64's finaliser, modulo 2^64 and with the last word
/// zero-padded: H(row) = size_bytes + sum_i mix(word_i + (i+1)G); a sample of arrays a = 0, 1, ... is
/// mix(sum_a mix(H_a + (a+1)G)); the digest is the sum over samples. Not thread-safe.
class digest {
 public:
    explicit digest(const pinflow::device& device);
    ~digest();
    digest(const digest&) = delete;
    digest& operator=(const digest&) = delete;

    /// Adds the samples of `batch`, enqueued on `stream`, which must have been given to `loader::next` or
    /// `batch::used_on` for this batch. Does not wait; the lease may end right after. The destructor waits
    /// until all samples are added. On the host a batch may be a view of a mapped file. If that file is
    /// truncated before it is read, a later call or `value` throws data_changed. Without the fault guard,
    /// reading it raises SIGBUS (see install_fault_guard).
    /// @throws invalid_argument for a stream of another device or a batch that has been released;
    /// data_changed if rows of an earlier batch were lost.
    void add_async(const batch& batch, stream_view stream);
    /// The sum so far. Waits for every stream that samples were added on.
    /// @throws data_changed, with the path of the file, if rows of a batch were lost before they were read.
    std::uint64_t value();

 private:
    /// A stream that samples were added on, and an event after the last of them.
    struct added_stream {
        void* handle;
        event last;
    };

    class lost_rows;
    void add_views_async(const batch& batch, stream_view stream);

    stream stream_;
    device_buffer sum_;
    std::vector<added_stream> added_;
    std::vector<detail::digest_array> arrays_;  ///< of one batch; kept to reuse its memory
    std::shared_ptr<lost_rows> lost_;           ///< shared with the enqueued work
};

}  // namespace pinflow
