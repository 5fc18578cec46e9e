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
    std::byte* destination = nullptr;

    std::uint64_t size_bytes() const noexcept { return ids.size() * reader->source().row_size_bytes(); }
    /// The job for its rows first ... first + count - 1.
    read_job part(std::size_t first, std::size_t count) const {
        return {filling, reader, ids.subspan(first, count),
                destination + first * reader->source().row_size_bytes()};
    }
};

/// Slots that are filled, copied and announced together. A group passes through the stages of the pipeline.
struct slot_group {
    enum class state : std::uint8_t { idle, sampled, filled };

    state reached = state::idle;
    std::vector<slot*> slots;        ///< in the order of their batches
    std::vector<read_job> jobs;      ///< for the CPU
    std::vector<copy_range> copies;  ///< for the copy engine, after the jobs
};

}  // namespace pinflow::detail
