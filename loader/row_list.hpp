#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "loader/slots.hpp"
#include "pinflow/buffer.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail {

/// A 64-bit number (row id or address) for each row of each slot, in pinned memory and in device memory. Each
/// slot has room for `max_slot_rows` numbers, right after that of the slot before.
class row_list {
 public:
    row_list(std::size_t slot_count, std::uint64_t max_slot_rows, const device_allocator& allocator)
        : max_slot_rows_(max_slot_rows),
          host_(slot_count * max_slot_rows * sizeof(std::uint64_t), allocator.stream.device()),
          device_(allocator.allocate(host_.size_bytes())) {}

    /// The room of a slot in pinned memory.
    std::span<std::uint64_t> of(const slot& slot) const {
        return {reinterpret_cast<std::uint64_t*>(host_.data()) + slot.index * max_slot_rows_, max_slot_rows_};
    }
    const std::uint64_t* on_device(const slot& slot) const {
        return reinterpret_cast<const std::uint64_t*>(device_.data()) + slot.index * max_slot_rows_;
    }
    /// Copies the numbers of consecutive slots to the device: `row_count` numbers, from the first number of
    /// `first` on. See for_runs.
    void upload_async(const slot& first, std::uint64_t row_count, stream_view stream) const {
        const std::uint64_t offset_bytes = first.index * max_slot_rows_ * sizeof(std::uint64_t);
        copy_to_device_async(device_.data() + offset_bytes,
                             host_.bytes().subspan(offset_bytes, row_count * sizeof(std::uint64_t)), stream);
    }

 private:
    std::uint64_t max_slot_rows_;
    pinned_buffer host_;
    device_buffer device_;
};

/// Calls `work(slots, row_count)` for each run of slots whose numbers are contiguous: consecutive slots, all
/// full except the last. A run has at most `max_slots` slots.
template <typename Work>
void for_runs(std::span<slot* const> slots, std::uint64_t max_slot_rows, std::size_t max_slots, Work work) {
    while (!slots.empty()) {
        std::size_t count = 1;
        std::uint64_t rows = slots[0]->row_ids.size();
        while (count < std::min(slots.size(), max_slots) && rows == count * max_slot_rows &&
               slots[count]->index == slots[count - 1]->index + 1) {
            rows += slots[count]->row_ids.size();
            ++count;
        }
        work(slots.first(count), rows);
        slots = slots.subspan(count);
    }
}

/// The destinations of an array's rows in these slots, `offset_bytes` into their device sides.
inline row_parts parts_of(std::span<slot* const> slots, std::uint64_t offset_bytes) {
    row_parts parts;
    for (const slot* const each : slots) {
        parts.rows[parts.count] = each->device_side + offset_bytes;
        parts.first[parts.count + 1] = parts.first[parts.count] + each->row_ids.size();
        ++parts.count;
    }
    return parts;
}

}  // namespace pinflow::detail
