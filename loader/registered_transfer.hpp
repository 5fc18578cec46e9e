#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "loader/array_transfer.hpp"
#include "loader/row_reader.hpp"
#include "src/core/extent_index.hpp"
#include "src/core/extent_stride.hpp"

namespace pinflow::detail {

/// A transfer of an array whose pages are registered while its rows are delivered. The copy engine or a
/// kernel reads rows of registered pages in place. The CPU gathers all other rows.
class registered_transfer : public array_transfer {
 public:
    std::string reason() const override;
    /// Until registration has finished, the planned transfer.
    transfer main() const override;
    bool needs_cpu() const override { return !pages_.all_registered() || !array().facts.is_mapped; }
    const pinned_pages* pages() const override { return &pages_; }

 protected:
    /// Begins to register the pages, and waits for all of them if the plan requires them.
    /// @throws as make_transfer.
    registered_transfer(sample_array planned, const loader_setup& setup);

    /// Rows `first` ... `first + count - 1` of a batch, contiguous at `rows` in `extent`. `rows` is null if
    /// they are not mapped.
    struct row_run {
        const row_extent* extent = nullptr;
        std::size_t first = 0;
        std::size_t count = 0;
        const std::byte* rows = nullptr;
        bool is_registered = false;
    };
    /// Calls `take(row_run)` for all rows of a batch, in their order. A run has up to `max_rows` contiguous
    /// rows of one extent that are all registered, or all not registered. Rows that overlap or have gaps
    /// between them come one by one.
    template <typename Take>
    void for_runs_of(const slot& filling, std::size_t max_rows, Take take) {
        const std::span<const std::uint64_t> ids = filling.row_ids;
        const bool all_registered = pages_.all_registered();
        if (array().facts.is_strided) max_rows = 1;
        for (std::size_t first = 0; first < ids.size();) {
            const auto [extent, index] = extents_.find(ids[first]);
            const std::size_t end =
                first + std::min<std::uint64_t>({max_rows, ids.size() - first, extent->row_count - index});
            std::size_t last = setup_.is_in_order ? end : first + 1;  // in order, rows are consecutive
            while (last < end && ids[last] == ids[last - 1] + 1)
                ++last;
            row_run run{.extent = extent, .first = first, .count = last - first};
            if (extent->data != nullptr) {
                run.rows = extent->data + index * stride_of(*extent, array().row_bytes());
                run.is_registered = all_registered;
            }
            if (run.rows == nullptr || all_registered) {
                take(run);
            } else {
                split_by_pages(run, take);
            }
            first = last;
        }
    }
    /// Writes the addresses of the rows, if all pages are registered and the rows lie in one extent. That is
    /// several times as fast as for_runs_of.
    /// @return whether it did.
    bool list_registered(std::span<const std::uint64_t> ids, std::span<std::uint64_t> addresses) const {
        const auto extents = array().source->extents();
        if (extents.size() != 1 || extents[0].data == nullptr || !pages_.all_registered()) return false;
        const auto first = reinterpret_cast<std::uintptr_t>(extents[0].data);
        const std::uint64_t stride_bytes = stride_of(extents[0], array().row_bytes());
        std::ranges::transform(ids, addresses.begin(),
                               [=](std::uint64_t id) { return first + id * stride_bytes; });
        return true;
    }
    /// Rows for the CPU to gather. If `target` is null, they pass through a staging buffer to `on_device`.
    struct staged_rows {
        std::span<const std::uint64_t> ids;
        std::byte* target = nullptr;
        std::byte* on_device = nullptr;
    };
    /// Counts staged bytes and adds the job.
    void stage(slot& filling, slot_group& group, const staged_rows& rows);
    void note_staged(std::uint64_t size_bytes) { staged_bytes_ += size_bytes; }
    /// The address of the array's rows in the slot's staging side.
    /// @throws unsupported if there is none, because the plan requires registered pages.
    std::byte* host_rows(const slot& filling) const;
    [[noreturn]] void refuse_unregistered() const;
    const loader_setup& setup() const noexcept { return setup_; }

 private:
    transfer fallback() const { return array().plan.fallback.value_or(transfer::staged); }
    void require_pages() const;
    template <typename Take>
    void split_by_pages(row_run rest, Take take) {
        const std::uint64_t row_bytes = array().row_bytes();
        if (array().plan.pages->is_awaited) {
            await(rest.rows, rest.count * row_bytes);
        } else if (setup_.is_in_order) {
            pages_.set_reader_position(rest.rows);
        }
        while (rest.count > 0) {
            const pin_run run = pages_.run_at(rest.rows, rest.count * row_bytes);
            std::size_t count = run.size_bytes / row_bytes;
            const bool is_registered = run.registered && count > 0;
            // a partly registered row counts as not registered
            if (!is_registered) count = run.registered ? 1 : (run.size_bytes + row_bytes - 1) / row_bytes;
            row_run next = rest;
            next.count = count;
            next.is_registered = is_registered;
            take(next);
            rest.first += count;
            rest.count -= count;
            rest.rows += count * row_bytes;
        }
    }
    void await(const std::byte* data, std::uint64_t size_bytes);

    loader_setup setup_;
    extent_index extents_;
    row_reader reader_;
    std::atomic<std::uint64_t> staged_bytes_ = 0;
    std::atomic<bool> stands_still_ = false;
    pinned_pages pages_;
};

}  // namespace pinflow::detail
