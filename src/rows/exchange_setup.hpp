#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "pinflow/rows.hpp"
#include "src/rows/transfer_planner.hpp"

namespace pinflow::detail {

enum class row_direction : std::uint8_t { gather, scatter };

/// What the plan of a call depends on, besides the exchange.
struct call_kind {
    row_direction direction = row_direction::gather;
    std::uint64_t count = 0;  ///< rows, of all batches together
    ids_in ids = ids_in::host_memory;
};

/// What all calls of a row exchange share.
struct exchange_setup {
    exchange_setup(row_table of_table, pinflow::device of_device, row_exchange_options of_options,
                   std::uint64_t staging)
        : table(std::move(of_table)),
          device(of_device),
          options(std::move(of_options)),
          staging_bytes(staging) {}

    row_table table;
    pinflow::device device;
    row_exchange_options options;
    /// As in the options, or less if memory is short.
    std::uint64_t staging_bytes;
    /// Why the device cannot access the table in place; empty if it can.
    std::string not_reached_reason;
    unsigned threads = 1;  ///< of the staged route, and for files on the host device

    /// Whether the table lies in a file. If the file is truncated, the CPU faults on the lost pages, even if
    /// they are locked.
    bool is_file_backed() const noexcept {
        return table.source() != nullptr && !table.source()->extents().empty() &&
               table.source()->extents()[0].file != nullptr;
    }
    /// Whether file_transfer takes the place of kernels.
    bool is_file_on_host() const noexcept { return device.kind() == device_kind::host && is_file_backed(); }
    /// The size of one staging buffer.
    std::uint64_t staging_buffer_bytes() const noexcept;
    /// What the planner has to know of a call.
    call_facts facts_of(const call_kind& call) const;
};

}  // namespace pinflow::detail
