#include "loader/row_reader.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "pinflow/fault_guard.hpp"
#include "src/core/extent_stride.hpp"
#include "src/core/fault_guard.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

/// Consecutive rows are copied as one piece if at least this many are next in the list.
constexpr std::uint64_t min_run_rows = 8;

/// The number of consecutive ids from the first on.
std::uint64_t neighbours(std::span<const std::uint64_t> ids, row_reader::list_order order) noexcept {
    if (order == row_reader::list_order::ascending && ids.back() - ids.front() == ids.size() - 1)
        return ids.size();
    std::uint64_t count = 1;
    while (count < ids.size() && ids[count] == ids[count - 1] + 1)
        ++count;
    return count;
}

}  // namespace

row_reader::row_reader(std::shared_ptr<const row_source> source, row_access access, list_order order)
    : source_(std::move(source)),
      extents_(source_->extents()),
      row_size_bytes_(source_->row_size_bytes()),
      order_(order),
      is_contiguous_(has_contiguous_extents(*source_)),
      is_mapped_(access == row_access::memory &&
                 std::ranges::any_of(source_->extents(),
                                     [](const row_extent& extent) { return extent.data != nullptr; })),
      is_file_backed_(std::ranges::any_of(source_->extents(),
                                          [](const row_extent& extent) { return extent.file != nullptr; })),
      // A source without extents and without memory of its own (a user's, for example) may not report its
      // waits, so that they are measured here. HDF5 datasets that libhdf5 reads are an exception: their waits
      // are neither reported nor measured, and count as time of the CPU.
      source_reports_waits_(!source_->extents().empty() || source_->memory_bytes() > 0) {}

std::chrono::nanoseconds row_reader::read(std::span<const std::uint64_t> ids, std::byte* destination,
                                          read_session& session) const {
    access_facts rows{.is_mapped = is_mapped_ && row_size_bytes_ != 0,
                      .is_file_backed = is_file_backed_,
                      .has_waited_lately = reads_left_.load(std::memory_order_relaxed) != 0};
    // Asked only if it matters, because the answer takes system calls. If a test simulates storage with a
    // hook, use reads, because only reads call the hook.
    if (rows.is_mapped && rows.is_file_backed && !rows.has_waited_lately) {
        if (!session.can_be_guarded)
            session.can_be_guarded = is_guarded_thread() && !system::hook_is_installed();
        rows.can_be_guarded = *session.can_be_guarded;
    }
    const auto read_rows = [&] {
        session.timer.reset();  // a wait of the source must not count as one of a copy
        return read_from_source(ids, destination);
    };
    if (plan_access(rows) == row_access::source) return read_rows();
    const bool may_wait = is_file_backed_;
    if (may_wait && !session.timer) session.timer.emplace();
    // a row that is not mapped is read; so is a row that was lost with a part of its file, and the read
    // throws
    if (!copy(ids, destination)) return read_rows();
    if (!may_wait || !session.timer->has_faulted()) return {};
    reads_left_.store(thresholds.reads_after_wait, std::memory_order_relaxed);
    const std::chrono::nanoseconds waited = session.timer->blocked();
    session.timer.reset();
    return waited;
}

bool row_reader::copy(std::span<const std::uint64_t> ids, std::byte* destination) const {
    // some rows at a time, so that their addresses stay in the cache
    std::array<const std::byte*, 256> rows;
    while (!ids.empty()) {
        std::size_t taken = 0;
        std::size_t count = 0;         // pieces in `rows`
        std::uint64_t piece_rows = 1;  // rows in each piece
        const auto [first, index] = extents_.find(ids[0]);
        const auto in_extent = ids.first(std::min<std::uint64_t>(ids.size(), first->row_count - index));
        const std::uint64_t run = is_contiguous_ ? neighbours(in_extent, order_) : 1;
        if (run >= min_run_rows) {
            rows[count++] = address_of(*first, index);
            taken = piece_rows = run;
        } else {
            for (; taken < std::min(ids.size(), rows.size()); ++taken) {
                const auto place = extents_.find(ids[taken]);
                rows[count++] = address_of(*place.extent, place.index);
            }
        }
        const std::span pieces = std::span(rows).first(count);
        if (std::ranges::find(pieces, nullptr) != pieces.end()) return false;
        const auto copy_some = [=, this] { copy_rows(pieces, piece_rows * row_size_bytes_, destination); };
        if (!is_file_backed_) {
            copy_some();
        } else if (!run_guarded(copy_some)) {
            return false;
        }
        destination += taken * row_size_bytes_;
        ids = ids.subspan(taken);
    }
    return true;
}

const std::byte* row_reader::address_of(const row_extent& extent, std::uint64_t index) const noexcept {
    return extent.data == nullptr ? nullptr : extent.data + index * stride_of(extent, row_size_bytes_);
}

std::chrono::nanoseconds row_reader::read_from_source(std::span<const std::uint64_t> ids,
                                                      std::byte* destination) const {
    std::optional<blocked_timer> timer;
    if (!source_reports_waits_) timer.emplace();
    auto waited = source_->read_rows(ids, {destination, ids.size() * row_size_bytes_});
    if (timer && waited.count() == 0) waited = timer->blocked();
    if (waited.count() > 0) {
        reads_left_.store(thresholds.reads_after_wait, std::memory_order_relaxed);
    } else if (const int left = reads_left_.load(std::memory_order_relaxed); left > 0) {
        reads_left_.store(left - 1, std::memory_order_relaxed);  // a lost update does no harm
    }
    return waited;
}

}  // namespace pinflow::detail
