#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"
#include "src/device/record_work.hpp"
#include "src/train/row_groups.hpp"

namespace pinflow::detail {

/// The memory of one step of an embedding table, and what is going on with it.
struct table_step {
    enum class phase : std::uint8_t {
        free,
        grouping,    ///< a thread prepares its gather
        prefetched,  ///< its rows are being gathered, unless there was a failure
        leased,
        dropped,    ///< not committed; free_dropped frees it
        committed,  ///< its rows are being written, or have been
    };

    table_step(std::uint64_t max_ids, std::uint64_t record_bytes, stream_view stream,
               const std::shared_ptr<memory_resource>& resource);

    /// The step's indices in host memory, and in device memory.
    row_groups host_groups() const noexcept { return groups_at(host.data()); }
    row_groups device_groups() const noexcept { return groups_at(indices.data()); }
    std::span<const std::uint64_t> ids() const noexcept { return {host_groups().ids, row_count}; }
    record_rows rows() const noexcept { return {records.data(), device_groups().ids, row_count}; }
    /// Copies the indices from host memory to the device.
    void upload(stream_view stream) const;

    phase now = phase::free;
    std::uint64_t max_ids;
    std::vector<std::uint64_t> requested;  ///< the ids, as the caller gave them
    std::uint64_t row_count = 0;           ///< different ids
    std::exception_ptr failure = nullptr;  ///< of preparing the gather; for the fetch
    device_buffer records;
    device_buffer indices;
    pinned_buffer host;
    event gathered;  ///< all rows have arrived
    event ready;     ///< the lease's rows are those that all commits before its fetch have left
    event updated;   ///< the rows have their new values
    event written;   ///< they are in the table
    event released;  ///< whoever read the records has passed
    /// Commits whose rows the gather may have missed or read half-written, or that came after the fetch;
    /// oldest first.
    std::vector<table_step*> newer;
    unsigned readers = 0;  ///< steps that have this one among `newer`
    /// Whether all later gathers come after `written`.
    bool is_ordered = false;

 private:
    row_groups groups_at(std::byte* base) const noexcept;
};

}  // namespace pinflow::detail
