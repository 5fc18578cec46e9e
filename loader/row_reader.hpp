#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "loader/thread_time.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/extent_index.hpp"
#include "src/core/row_copy.hpp"
#include "src/rows/transfer_planner.hpp"

namespace pinflow::detail {

/// What consecutive reads of one thread share, to save system calls: with batches of 200 KiB these took a
/// tenth of the time.
struct read_session {
    std::optional<bool> can_be_guarded;  ///< the thread's copies from mappings
    std::optional<blocked_timer> timer;  ///< since the first copy after a wait or a read from the source
};

/// Gathers rows of one array into host memory, for the transfers in which the CPU does that. Thread-safe.
///
/// plan_access says for each `read` whether rows are copied from the mapping or read.
class row_reader {
 public:
    /// The order of the ids of each `read`.
    enum class list_order : std::uint8_t {
        any,
        ascending,  ///< each id is greater than the one before
    };
    /// @param access `source`: rows are never copied from the mapping
    row_reader(std::shared_ptr<const row_source> source, row_access access,
               list_order order = list_order::any);

    /// Writes the rows `ids` to `destination`, one after the other. `session` is for one thread.
    /// @return the time spent waiting for storage. If copies waited, this is the time for which the thread
    /// was blocked since the session's timer began, so also in earlier copies.
    /// @throws as row_source::read_rows.
    std::chrono::nanoseconds read(std::span<const std::uint64_t> ids, std::byte* destination,
                                  read_session& session) const;

    const row_source& source() const noexcept { return *source_; }
    /// Whether the rows of each extent are contiguous; also true without extents.
    bool is_contiguous() const noexcept { return is_contiguous_; }

 private:
    /// @return whether all rows were copied. If not, some rows may have been copied.
    bool copy(std::span<const std::uint64_t> ids, std::byte* destination) const;
    /// Null if the extent is not mapped.
    const std::byte* address_of(const row_extent& extent, std::uint64_t index) const noexcept;
    std::chrono::nanoseconds read_from_source(std::span<const std::uint64_t> ids,
                                              std::byte* destination) const;

    std::shared_ptr<const row_source> source_;
    extent_index extents_;
    std::uint64_t row_size_bytes_;
    list_order order_;
    bool is_contiguous_;
    bool is_mapped_;             ///< some rows are mapped, and `access` is memory
    bool is_file_backed_;        ///< pages may be lost, or not in memory
    bool source_reports_waits_;  ///< otherwise this reader measures them
    /// How many more consecutive reads must not wait for storage before rows are copied again.
    mutable std::atomic<int> reads_left_ = 0;
};

}  // namespace pinflow::detail
