#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"
#include "src/device/record_work.hpp"
#include "src/device/row_work.hpp"
#include "src/train/row_groups.hpp"

namespace pinflow::detail {

/// The numbers of a step, in front of its lists of indices, in host memory and in device memory.
struct step_numbers {
    std::uint64_t row_count = 0;  ///< different ids
    /// The rows below device_rows, and the others. Only if the device has grouped the ids.
    row_range ranges[2] = {};
    /// What the device's sort has found in the ids; in host memory what it has reported.
    index_errors errors = {};
    error_count counting = {};  ///< of the sort
};

/// The memory of one step of an embedding table, and what is going on with it.
struct table_step {
    enum class phase : std::uint8_t {
        free,
        grouping,    ///< a thread prepares its gather
        prefetched,  ///< its rows are being gathered, unless there was a failure
        leased,
        dropped,    ///< not committed; free_dropped frees it
        lost,       ///< dropped, but no event could be recorded: its memory is not used again
        committed,  ///< its rows are being written, or have been
    };

    table_step(std::uint64_t max_ids, const record_layout& layout, stream_view stream,
               const std::shared_ptr<memory_resource>& resource);

    /// The step's indices in host memory, and in device memory.
    row_groups host_groups() const noexcept { return groups_at(host.data()); }
    row_groups device_groups() const noexcept { return groups_at(indices.data()); }
    std::span<const std::uint64_t> ids() const noexcept { return {host_groups().ids, row_count}; }
    step_numbers& host_numbers() const noexcept { return *reinterpret_cast<step_numbers*>(host.data()); }
    step_numbers& device_numbers() const noexcept { return *reinterpret_cast<step_numbers*>(indices.data()); }
    record_rows rows() const noexcept {
        return {records.data(), device_groups().ids, &device_numbers().row_count, row_count};
    }
    /// Sets `requested` to a copy of `ids` in page-locked memory.
    void copy_requested(std::span<const std::uint64_t> ids);
    /// Copies the numbers to the device. If the CPU has grouped the ids, also the indices; if the device
    /// groups them, also the ids, unless they are in device memory.
    void upload(stream_view stream) const;
    /// The caller's ids in device memory, until they are grouped.
    const std::uint64_t* ids_to_group() const noexcept {
        return requested_on_device != nullptr ? requested_on_device : device_groups().ids;
    }

    phase now = phase::free;
    std::uint64_t max_ids;
    std::uint64_t position_count = 0;                    ///< the number of the caller's ids
    std::span<const std::uint64_t> requested;            ///< the caller's ids, if they are in host memory
    const std::uint64_t* requested_on_device = nullptr;  ///< the caller's ids, if they are in device memory
    bool is_grouped_on_device = false;                   ///< otherwise the CPU groups the ids
    bool is_listed = false;                              ///< `listed` was recorded for these ids
    std::uint64_t row_count = 0;           ///< different ids; position_count if the device groups them
    std::exception_ptr failure = nullptr;  ///< of preparing the gather; for the fetch
    device_buffer records;
    device_buffer indices;
    device_buffer sums;  ///< record_update::sums
    pinned_buffer host;
    event ids_ready;  ///< the caller's stream has reached the fetch of ids in device memory
    event grouped;    ///< the indices are in device memory, and those in host memory are not used any more
    event listed;     ///< the ids of rows that the device has grouped are in host memory
    event gathered;   ///< all rows have arrived
    event ready;      ///< the lease's rows are those that all commits before its fetch have left
    event updated;    ///< the rows have their new values
    event written;    ///< they are in the table
    event released;   ///< whoever read the records has passed
    /// Commits whose rows the gather may have missed or read half-written, or that came after the fetch;
    /// oldest first.
    std::vector<table_step*> newer;
    unsigned readers = 0;  ///< steps that have this one among `newer`
    /// Whether all later gathers come after `written`.
    bool is_ordered = false;

 private:
    row_groups groups_at(std::byte* base) const noexcept;
};

/// Records the event. If that fails, waits for the stream instead, so that the work which the event should
/// mark has ended, and throws.
void record_or_wait(event& passed, stream_view stream);
/// The same while another error is handled.
void record_or_wait_noexcept(event& passed, stream_view stream) noexcept;

}  // namespace pinflow::detail
