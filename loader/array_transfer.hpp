#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "loader/device_held.hpp"
#include "loader/slot_group.hpp"
#include "pinflow/device.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/row_source.hpp"
#include "src/rows/transfer_plan.hpp"

namespace pinflow::detail {

/// One array of the samples of a loader.
struct sample_array {
    std::shared_ptr<const row_source> source;
    transfer_plan plan;
    std::uint64_t offset_bytes = 0;  ///< of its rows in a side of a slot
    bool is_aligned = false;         ///< every row lies at a multiple of 16 bytes, and has such a size

    std::uint64_t row_bytes() const noexcept { return source->row_size_bytes(); }
};

/// What the arrays of a loader have in common.
struct loader_setup {
    pinflow::device device;
    std::size_t slot_count = 2;
    std::uint64_t rows_of_slot = 0;
    bool is_in_order = false;     ///< the rows of a batch follow each other
    std::uint64_t first_row = 0;  ///< of the first batch, if they do
    pin_options pinning;
    std::shared_ptr<device_held> held = nullptr;  ///< arrays held on the device; null: there are none
    std::function<bool()> is_stopped;             ///< whether the loader ends
};

/// Carries out the plan of one array. A group of slots is prepared by one thread, several groups side by
/// side; groups are enqueued one after the other.
class array_transfer {
 public:
    array_transfer() = default;
    array_transfer(const array_transfer&) = delete;
    array_transfer& operator=(const array_transfer&) = delete;
    virtual ~array_transfer() = default;

    /// What has to be done once, before the first batch. May take its time.
    virtual void begin() {}
    /// Lists what brings the rows of `filling` to its device side: jobs for the CPU and copies behind them.
    virtual void prepare(slot& filling, slot_group& group) = 0;
    /// Uploads the row lists that `enqueue` needs, and enqueues work that depends on them alone.
    /// `lists` is a separate stream for short work: the stream of `enqueue` waits for it, and an engine that
    /// waits polls over PCIe.
    /// @return whether anything was enqueued.
    virtual bool enqueue_lists(std::span<slot* const> /*slots*/, stream_view /*lists*/) { return false; }
    /// Enqueues what follows the copies of the group, of whose slots these have no error.
    virtual void enqueue(std::span<slot* const> /*slots*/, stream_view /*stream*/) {}
    /// Where the rows of a slot are for the consumer.
    virtual const std::byte* rows_of(const slot& filled) const = 0;

    /// One sentence: why this transfer, and what has become of it.
    virtual std::string reason() const = 0;
    /// What moved most rows so far, or will move them.
    virtual transfer main() const = 0;
    /// Whether the CPU copies rows, from now on or in places.
    virtual bool copies() const = 0;
    /// Page-locking of the array's pages; null if there is none.
    virtual const pinned_pages* pages() const { return nullptr; }
};

/// @throws unsupported if pages that must be registered cannot be. Errors of reading a held array are
/// thrown by `begin`, not here.
std::unique_ptr<array_transfer> make_transfer(const sample_array& array, const loader_setup& setup);

// ---- the kinds of transfers, by file ---------------------------------------------------------------------

/// cpu_transfer.cpp: slot copy, staged, decode and read; the mapping itself.
std::unique_ptr<array_transfer> make_cpu_transfer(const sample_array& array, const loader_setup& setup);
std::unique_ptr<array_transfer> make_view_transfer(const sample_array& array, const loader_setup& setup);
/// held_transfer.cpp
std::unique_ptr<array_transfer> make_held_transfer(const sample_array& array, const loader_setup& setup);
/// registered_transfer.cpp: the copy engine and kernels, with staging for what is not registered.
std::unique_ptr<array_transfer> make_registered_transfer(const sample_array& array,
                                                         const loader_setup& setup);

}  // namespace pinflow::detail
