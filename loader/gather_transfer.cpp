#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "loader/registered_transfer.hpp"
#include "loader/row_list.hpp"
#include "pinflow/buffer.hpp"
#include "src/device/backend.hpp"

namespace pinflow::detail {

namespace {

/// Gathers rows with a kernel, which reads every row by its address: on its registered page, or in the
/// staging side of the slot.
class gather_transfer final : public registered_transfer {
 public:
    gather_transfer(sample_array planned, const loader_setup& setup)
        : registered_transfer(std::move(planned), setup),
          part_(array().plan.parts.front()),
          addresses_(setup.slot_count, setup.max_slot_rows, setup.allocator),
          unregistered_ids_(setup.slot_count),
          is_copied_(setup.slot_count) {
        if (!part_.sorted) return;
        const std::uint64_t row_count = setup.slot_count * setup.max_slot_rows;
        sorted_ = setup.allocator.allocate(row_count * sizeof(std::uint64_t));
        positions_ = setup.allocator.allocate(row_count * sizeof(std::uint32_t));
        const auto extents = array().source->extents();
        const auto end_of = [&](const row_extent& each) {
            return each.data + span_bytes(each, array().row_bytes());
        };
        const std::byte* const low = std::ranges::min(extents, {}, &row_extent::data).data;
        address_range_ = static_cast<std::uint64_t>(end_of(std::ranges::max(extents, {}, end_of)) - low);
        const std::uint64_t max_run_rows =
            std::min<std::uint64_t>(setup.slot_count, row_parts::max) * setup.max_slot_rows;
        scratch_ = setup.allocator.allocate(
            setup.device.backend().sort_scratch_bytes(max_run_rows, address_range_, sort_kernels::several));
    }

    void prepare(slot& filling, slot_group& group) override {
        const std::uint64_t row_bytes = array().row_bytes();
        if (row_bytes == 0 || filling.row_ids.empty()) return;
        const std::span<std::uint64_t> addresses = addresses_.of(filling);
        is_copied_[filling.index] = 0;
        if (list_registered(filling.row_ids, addresses)) return;
        std::vector<std::uint64_t>& unregistered = unregistered_ids_[filling.index];
        unregistered.clear();
        for_runs_of(filling, 1, [&](const row_run& row) {
            const std::byte* data = row.rows;
            if (!row.is_registered) {
                data = host_rows(filling) + unregistered.size() * row_bytes;
                unregistered.push_back(filling.row_ids[row.first]);
            }
            addresses[row.first] = reinterpret_cast<std::uintptr_t>(data);
        });
        if (!unregistered.empty()) stage(filling, group, {.ids = unregistered, .target = host_rows(filling)});
        // if no row is registered, the rows are copied, without a kernel that reads the staging side
        is_copied_[filling.index] = unregistered.size() == filling.row_ids.size() ? 1 : 0;
        if (is_copied_[filling.index] != 0)
            group.copies.push_back(
                {device_rows(filling), host_rows(filling), unregistered.size() * row_bytes});
    }

    bool enqueue_lists(std::span<slot* const> slots, stream_view lists) override {
        bool has_lists = false;
        for_gathered(slots, [&](std::span<slot* const> run, std::uint64_t rows) {
            addresses_.upload_async(*run[0], rows, lists);
            if (part_.sorted) {
                // sorted by the low bits of the addresses, enough of them to tell the rows of the array
                // apart; rows in the staging sides may come anywhere among these
                setup().device.backend().sort_rows({addresses_.on_device(*run[0]),
                                                    rows,
                                                    address_range_,
                                                    sorted_of(*run[0]),
                                                    positions_of(*run[0]),
                                                    scratch_.data(),
                                                    scratch_.size_bytes(),
                                                    sort_kernels::several,
                                                    {}},
                                                   lists.native_handle());
            }
            has_lists = true;
        });
        return has_lists;
    }

    void enqueue(std::span<slot* const> slots, stream_view stream) override {
        for_gathered(slots, [&](std::span<slot* const> run, std::uint64_t rows) {
            row_transfer gather;
            gather.table.row_size_bytes = array().row_bytes();
            gather.table.by_address = true;
            gather.table.addresses_are_aligned = array().facts.is_aligned;
            // equal rows are not detected, but gathered again
            gather.order = {.ids = addresses_.on_device(*run[0]), .count = rows};
            if (part_.sorted)
                gather.order = {.ids = sorted_of(*run[0]), .positions = positions_of(*run[0]), .count = rows};
            gather.parts = parts_of(run, array().offset_bytes);
            gather.end = rows;
            gather.blocks = part_.blocks;
            setup().device.backend().gather_rows(gather, stream.native_handle());
        });
    }

 private:
    /// Calls `work` as for_runs does, for the slots whose rows a kernel gathers.
    template <typename Work>
    void for_gathered(std::span<slot* const> slots, Work work) const {
        if (array().row_bytes() == 0) return;
        std::vector<slot*> gathered;
        std::ranges::copy_if(slots, std::back_inserter(gathered),
                             [&](const slot* each) { return is_copied_[each->index] == 0; });
        for_runs(std::span<slot* const>(gathered), setup().max_slot_rows, row_parts::max, work);
    }
    std::uint64_t* sorted_of(const slot& first) const {
        return reinterpret_cast<std::uint64_t*>(sorted_.data()) + first.index * setup().max_slot_rows;
    }
    std::uint32_t* positions_of(const slot& first) const {
        return reinterpret_cast<std::uint32_t*>(positions_.data()) + first.index * setup().max_slot_rows;
    }

    transfer_part part_;
    row_list addresses_;
    std::vector<std::vector<std::uint64_t>> unregistered_ids_;  ///< for each slot
    /// For each slot: whether all its rows are staged, and copied by the copy engine.
    std::vector<std::uint8_t> is_copied_;
    // to sort the lists
    device_buffer sorted_;
    device_buffer positions_;
    device_buffer scratch_;
    std::uint64_t address_range_ = 0;
};

}  // namespace

std::unique_ptr<array_transfer> make_gather_transfer(sample_array array, const loader_setup& setup) {
    return std::make_unique<gather_transfer>(std::move(array), setup);
}

}  // namespace pinflow::detail
