#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "loader/row_reader.hpp"
#include "loader/slots.hpp"
#include "pinflow/buffer.hpp"

namespace pinflow::detail {

/// Rows of a slot for the CPU to gather.
struct read_job {
    slot* filling = nullptr;
    const row_reader* reader = nullptr;
    std::span<const std::uint64_t> ids;
    /// Where the rows are written, in host memory. Null: into a staging buffer, from which they are copied to
    /// `on_device` at once.
    std::byte* destination = nullptr;
    std::byte* on_device = nullptr;

    bool is_buffered() const noexcept { return destination == nullptr; }
    std::uint64_t size_bytes() const noexcept { return ids.size() * reader->source().row_size_bytes(); }
    /// The job for its rows first ... first + count - 1.
    read_job part(std::size_t first, std::size_t count) const {
        const std::uint64_t skipped_bytes = first * reader->source().row_size_bytes();
        return {filling, reader, ids.subspan(first, count),
                is_buffered() ? nullptr : destination + skipped_bytes,
                is_buffered() ? on_device + skipped_bytes : nullptr};
    }
};

/// Slots that are filled, copied and announced together. A group passes through the stages of the pipeline.
struct slot_group {
    enum class state : std::uint8_t { idle, sampled, filled };

    state reached = state::idle;
    std::vector<slot*> slots;        ///< in the order of their batches
    std::vector<read_job> jobs;      ///< for the CPU
    std::vector<copy_range> copies;  ///< for the copy engine, after the jobs
    bool has_buffered = false;       ///< some jobs' rows are copied as soon as they are read
};

}  // namespace pinflow::detail
