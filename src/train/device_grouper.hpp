#pragma once

#include <cstdint>
#include <memory>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"
#include "src/train/table_step.hpp"

namespace pinflow::detail {

/// Groups equal ids in device memory, on the device. Its memory is used by one stream at a time, in its
/// order.
class device_grouper {
 public:
    device_grouper(std::uint64_t max_ids, stream_view stream, std::shared_ptr<memory_resource> resource);

    /// Enqueues the grouping of step.ids_to_group(). Writes the step's groups and numbers in device memory,
    /// the number of rows also in host memory, and ids that are not below `row_count` to its errors. Rows
    /// below `split_id` are the first range.
    void group(const table_step& step, std::uint64_t row_count, std::uint64_t split_id, stream_view stream);

 private:
    std::uint64_t sort_bytes_;
    std::uint64_t ids_bytes_, counts_bytes_;  ///< where the sorted ids and the counts begin
    device_buffer memory_;
};

}  // namespace pinflow::detail
