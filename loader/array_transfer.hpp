#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "loader/device_held.hpp"
#include "loader/slot_group.hpp"
#include "pinflow/device.hpp"
#include "pinflow/pin.hpp"
#include "src/rows/transfer_planner.hpp"

namespace pinflow::detail {

/// The settings that all arrays of a loader share.
struct loader_setup {
    pinflow::device device;
    /// Allocates device memory in the constructors of transfers only: its stream is destroyed once they are
    /// made.
    device_allocator allocator;
    std::size_t slot_count = 2;
    std::uint64_t max_slot_rows = 0;  ///< rows of the largest batch
    bool is_in_order = false;         ///< the rows of a batch are consecutive
    std::uint64_t first_row = 0;      ///< where the loader begins, over all ranks, if is_in_order
    pin_options pinning;
    std::shared_ptr<device_held> held = nullptr;  ///< arrays held on the device; null: there are none
    std::function<bool()> is_stopped;             ///< whether the loader is stopping
};

/// One array of a loader's samples, and the state of its transfer. Carries out the array's plan. One thread
/// prepares a group of slots. Several groups may be prepared at the same time, but only one group is enqueued
/// at a time.
class array_transfer {
 public:
    explicit array_transfer(sample_array array) : array_(std::move(array)) {}
    array_transfer(const array_transfer&) = delete;
    array_transfer& operator=(const array_transfer&) = delete;
    virtual ~array_transfer() = default;

    /// Prepares the transfer, once, before the first batch. Reads a held array, which may be slow.
    virtual void begin() {}
    /// Lists the work that gathers the rows of `filling` in its device side: jobs for the CPU, and copies
    /// after them. Pieces that are too short for the copy
    /// engine are read immediately, on the calling thread.
    virtual void prepare(slot& filling, slot_group& group) = 0;
    /// Uploads the row lists that `enqueue` needs, and enqueues work that depends on them alone. `slots` are
    /// those of `enqueue`.
    /// `lists` is a separate stream, for short work only: the stream of `enqueue` waits for it, and polls
    /// over PCIe meanwhile.
    /// @return whether anything was enqueued.
    virtual bool enqueue_lists(std::span<slot* const> /*slots*/, stream_view /*lists*/) { return false; }
    /// Enqueues the work that follows the copies of the group. Called only if `enqueue_lists` of some array
    /// returned true. `slots` are the group's slots before the first one with an error.
    virtual void enqueue(std::span<slot* const> /*slots*/, stream_view /*stream*/) {}
    /// The address at which the consumer finds the rows of a slot.
    virtual const std::byte* data_of(const slot& filled) const { return device_rows(filled); }

    /// One sentence: the reason for this transfer, and its state.
    virtual std::string reason() const { return array_.plan.reason; }
    /// The planned transfer. After registration, the fallback if less than half of the bytes were registered.
    virtual transfer main() const { return array_.plan.main(); }
    /// Whether the CPU may still have to gather rows of this array. Rows that boundaries between
    /// registrations cut into pieces too short for the copy engine do not count.
    virtual bool needs_cpu() const = 0;
    /// The array's registered pages; null if there are none.
    virtual const pinned_pages* pages() const { return nullptr; }

    const sample_array& array() const noexcept { return array_; }

 protected:
    /// The address of the array's rows in the slot's device side.
    std::byte* device_rows(const slot& filling) const { return filling.device_side + array_.offset_bytes; }

 private:
    sample_array array_;
};

/// Makes the transfer of an array. Errors of reading a held array are thrown by `begin`, not here.
/// @throws unsupported if pages that must be registered cannot be registered; data_changed if that is because
/// their file has changed.
/// @throws device_error or system_failure if memory for row lists cannot be allocated; what the
/// `memory_resource` throws.
std::unique_ptr<array_transfer> make_transfer(sample_array array, const loader_setup& setup);

// ---- the kinds of transfers, by file ---------------------------------------------------------------------

/// cpu_transfer.cpp: slot copy, staged, decode, read and view.
std::unique_ptr<array_transfer> make_cpu_transfer(sample_array array, const loader_setup& setup);
std::unique_ptr<array_transfer> make_view_transfer(sample_array array);
/// held_transfer.cpp
std::unique_ptr<array_transfer> make_held_transfer(sample_array array, const loader_setup& setup);
/// engine_transfer.cpp and gather_transfer.cpp: from registered pages, with a fallback for other rows.
std::unique_ptr<array_transfer> make_engine_transfer(sample_array array, const loader_setup& setup);
std::unique_ptr<array_transfer> make_gather_transfer(sample_array array, const loader_setup& setup);

}  // namespace pinflow::detail
