#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "loader/row_list.hpp"
#include "loader/slot_group.hpp"
#include "pinflow/buffer.hpp"
#include "src/device/backend.hpp"

namespace pinflow::detail {

/// The arrays that a loader holds in device memory. One kernel gathers the rows of up to
/// held_gather::max_tables arrays, for up to row_parts::max consecutive slots of a group. It reads the row
/// ids in pinned memory: if they were uploaded between copies of batches on another stream, the link would be
/// idle for a moment each time.
class device_held {
 public:
    /// Allocates pinned memory for the row ids of `slot_count` slots of at most `max_slot_rows` rows.
    /// @throws as pinned_buffer.
    device_held(std::size_t slot_count, std::uint64_t max_slot_rows, const pinflow::device& device)
        : device_(device),
          max_slot_rows_(max_slot_rows),
          ids_(slot_count * max_slot_rows * sizeof(std::uint64_t), device) {}

    /// Adds an array, which must stay in device memory as long as this object is used. Not thread-safe: add
    /// all arrays before the first `enqueue`.
    void add(const held_table& table) { tables_.push_back(table); }

    /// Copies the row ids of a slot to pinned memory. May be called for several slots at the same time. The
    /// last gather for the slot must be complete.
    void prepare(const slot& filling) const { std::ranges::copy(filling.row_ids, ids_of(filling)); }
    /// Enqueues the gathers for prepared slots.
    /// @throws device_error.
    void enqueue(std::span<slot* const> slots, stream_view stream) const {
        for_runs(slots, max_slot_rows_, row_parts::max, [&](std::span<slot* const> run, std::uint64_t rows) {
            held_gather gather;
            gather.ids = ids_of(*run[0]);
            gather.count = rows;
            gather.parts = parts_of(run, 0);
            for (const held_table& table : tables_) {
                gather.tables[gather.table_count++] = table;
                if (gather.table_count < held_gather::max_tables) continue;
                device_.backend().gather_held(gather, stream.native_handle());
                gather.table_count = 0;
            }
            if (gather.table_count > 0) device_.backend().gather_held(gather, stream.native_handle());
        });
    }

 private:
    std::uint64_t* ids_of(const slot& slot) const {
        return reinterpret_cast<std::uint64_t*>(ids_.data()) + slot.index * max_slot_rows_;
    }

    pinflow::device device_;
    std::uint64_t max_slot_rows_;
    pinned_buffer ids_;
    std::vector<held_table> tables_;
};

}  // namespace pinflow::detail
