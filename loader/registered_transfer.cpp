#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "loader/array_transfer.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/file.hpp"
#include "src/core/extent_index.hpp"
#include "src/device/backend.hpp"
#include "src/device/pin_limits.hpp"
#include "src/device/pin_registry.hpp"

// Transfers for arrays whose pages are registered while their rows are delivered. The copy engine or a kernel
// reads rows of registered pages in place. The CPU gathers all other rows, and reads pieces of registered
// rows that are too small for the copy engine.
namespace pinflow::detail {

namespace {

pin_options pinning_of(const sample_array& array, const loader_setup& setup) {
    pin_options options = setup.pinning;
    options.allow_partial = !array.plan.pages->is_required;
    if (array.plan.pages->piece_bytes != 0) options.piece_bytes = array.plan.pages->piece_bytes;
    options.registers_rest = array.plan.pages->registers_rest;
    if (setup.first_row > 0 && setup.first_row < array.source->row_count()) {
        const auto [extent, index] = extent_index(array.source->extents()).find(setup.first_row);
        if (extent->data != nullptr) options.begin_at = extent->data + index * array.row_bytes();
    }
    return options;
}

/// How long rows wait for their pages while registration makes no progress.
constexpr std::chrono::seconds max_page_wait{1};

class registered_transfer : public array_transfer {
 public:
    registered_transfer(const sample_array& array, const loader_setup& setup)
        : array_(array),
          setup_(setup),
          extents_(array.source->extents()),
          reader_(array.source,
                  array.plan.fallback == transfer::read ? row_access::source : row_access::memory),
          pages_(pin_ranges(array.source), setup.device, pinning_of(array, setup)) {
        if (array_.plan.pages->is_required) require_pages();
    }

    const std::byte* data_of(const slot& filled) const override {
        return filled.device_side + array_.offset_bytes;
    }
    std::string reason() const override {
        std::string reason = array_.plan.reason;
        const pin_report pinned = pages_.report();
        reason += "; " + (pinned.finished ? pinned.reason
                                          : fmt::format("{} of {} are registered so far",
                                                        in_binary_units(pinned.registered_bytes),
                                                        in_binary_units(pinned.total_bytes)));
        if (const std::uint64_t staged = staged_bytes_; staged > 0)
            reason += fmt::format("; {} {}", in_binary_units(staged), to_string(fallback()));
        return reason;
    }
    transfer main() const override {
        // until registration has finished, the planned transfer is reported
        if (!pages_.finished()) return array_.plan.main();
        const pin_report pinned = pages_.report();
        return pinned.registered_bytes * 2 < pinned.total_bytes ? fallback() : array_.plan.main();
    }
    bool needs_cpu() const override { return !pages_.all_registered(); }
    const pinned_pages* pages() const override { return &pages_; }

 protected:
    /// Rows `first` ... `first + count - 1` of a batch, contiguous at `rows` in `extent`. `rows` is null if
    /// they are not mapped.
    struct row_run {
        const row_extent* extent;
        std::size_t first;
        std::size_t count;
        const std::byte* rows;
        bool is_registered;
    };
    /// Calls `take(row_run)` for all rows of a batch, in their order. If `joins`, a run has contiguous rows
    /// of one extent that are all registered, or all not registered; otherwise it has one row.
    template <typename Take>
    void for_runs_of(const slot& filling, bool joins, Take take) {
        const std::span<const std::uint64_t> ids = filling.row_ids;
        const bool all_registered = pages_.all_registered();
        for (std::size_t first = 0; first < ids.size();) {
            const auto [extent, index] = extents_.find(ids[first]);
            std::size_t last = first + 1;
            while (joins && last < ids.size() && ids[last] == ids[last - 1] + 1 &&
                   index + (last - first) < extent->row_count)
                ++last;
            row_run run{extent, first, last - first, nullptr, false};
            if (extent->data != nullptr) {
                run.rows = extent->data + index * array_.row_bytes();
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
    /// Counts staged bytes and adds the job. If `target` is null, the rows pass through a staging buffer to
    /// `on_device`.
    void stage(slot& filling, slot_group& group, std::span<const std::uint64_t> ids, std::byte* target,
               std::byte* on_device = nullptr) {
        group.jobs.push_back({&filling, &reader_, ids, target, on_device});
        group.has_buffered = group.has_buffered || target == nullptr;
        note_staged(ids.size() * array_.row_bytes());
    }
    void note_staged(std::uint64_t size_bytes) { staged_bytes_ += size_bytes; }
    std::byte* device_rows(const slot& filling) const { return filling.device_side + array_.offset_bytes; }
    std::byte* host_rows(const slot& filling) const {
        if (filling.host_side == nullptr) refuse_unregistered();
        return filling.host_side + array_.offset_bytes;
    }
    [[noreturn]] void refuse_unregistered() const {
        throw unsupported(fmt::format("pages of {} are not registered", array_.source->description()));
    }
    const sample_array& array() const noexcept { return array_; }
    const loader_setup& setup() const noexcept { return setup_; }

 private:
    transfer fallback() const { return array_.plan.fallback.value_or(transfer::staged); }
    void require_pages() const {
        try {
            pages_.require();
        } catch (const unsupported&) {
            array_.source->check_unchanged();  // reports data_changed for a truncated file
            throw;
        }
    }
    template <typename Take>
    void split_by_pages(row_run rest, Take take) {
        const std::uint64_t row_bytes = array_.row_bytes();
        if (array_.plan.pages->is_awaited) {
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
            take(row_run{rest.extent, rest.first, count, rest.rows, is_registered});
            rest.first += count;
            rest.count -= count;
            rest.rows += count * row_bytes;
        }
    }
    /// Waits until these bytes are registered, as long as registration makes progress. After a standstill, no
    /// row waits any more: unregistered rows are staged.
    void await(const std::byte* data, std::uint64_t size_bytes) {
        const pin_run run = pages_.run_at(data, size_bytes);
        if (stands_still_ || (run.registered && run.size_bytes >= size_bytes)) return;
        constexpr std::chrono::milliseconds look_interval{1};
        std::uint64_t seen_bytes = pages_.report().registered_bytes;
        auto changed = std::chrono::steady_clock::now();
        while (!pages_.wait_for(data, size_bytes, look_interval)) {
            if (pages_.finished() || setup_.is_stopped()) return;
            const auto now = std::chrono::steady_clock::now();
            const std::uint64_t registered_bytes = pages_.report().registered_bytes;
            if (registered_bytes != seen_bytes) changed = now;
            seen_bytes = registered_bytes;
            if (now - changed > max_page_wait) stands_still_ = true;
            if (stands_still_) return;
        }
    }

    sample_array array_;
    loader_setup setup_;
    extent_index extents_;
    row_reader reader_;
    std::atomic<std::uint64_t> staged_bytes_ = 0;
    std::atomic<bool> stands_still_ = false;
    pinned_pages pages_;
};

/// Copies each run of contiguous registered rows with one copy. Runs of a file are cut at boundaries between
/// registrations. Pieces there that are too small for the copy engine, mostly a few hundred bytes at the end
/// of a row, are read into a buffer of 32 KiB for each slot. If they do not fit, their rows take the
/// fallback. So do unregistered rows and short runs: through shared staging buffers if there are any,
/// otherwise through the staging side of the slot.
class engine_transfer final : public registered_transfer {
 public:
    engine_transfer(const sample_array& array, const loader_setup& setup)
        : registered_transfer(array, setup),
          short_pieces_(min_piece_bytes() == 0 ? 0 : setup.slot_count * short_pieces_bytes, setup.device) {}

    bool needs_cpu() const override { return registered_transfer::needs_cpu() || is_too_short(); }

    void prepare(slot& filling, slot_group& group) override {
        if (array().row_bytes() == 0) return;
        batch_work of_batch{filling, group, {}, 0, 0, 0};
        for_runs_of(filling, true, [&](const row_run& rows) {
            if (!rows.is_registered && array().plan.pages->is_required) refuse_unregistered();
            rows.is_registered ? copy(rows, of_batch) : leave(rows, of_batch);
        });
        stage_left(of_batch);
    }

 private:
    /// What becomes of the rows of a batch.
    struct batch_work {
        slot& filling;
        slot_group& group;
        std::vector<copy_range> pieces;  ///< of the run that is being cut
        // neighbours that will be staged
        std::size_t first_left;
        std::size_t left_count;
        std::uint64_t short_bytes;  ///< of pieces that were read
    };

    /// For the short pieces of a batch.
    static constexpr std::uint64_t short_pieces_bytes = 32 << 10;

    std::uint64_t min_piece_bytes() const { return array().plan.parts.front().min_piece_bytes; }
    /// Whether rows are shuffled, so that they travel one by one, and too short for the copy engine.
    bool is_too_short() const { return !setup().is_in_order && array().row_bytes() < min_piece_bytes(); }

    /// Leaves rows for the CPU.
    static void leave(const row_run& rows, batch_work& of_batch) {
        if (of_batch.left_count == 0) of_batch.first_left = rows.first;
        of_batch.left_count += rows.count;
    }
    void stage_left(batch_work& of_batch) {
        const std::size_t count = std::exchange(of_batch.left_count, 0);
        if (count == 0) return;
        slot& filling = of_batch.filling;
        const std::span<const std::uint64_t> ids =
            std::span(filling.row_ids).subspan(of_batch.first_left, count);
        const std::uint64_t offset_bytes = of_batch.first_left * array().row_bytes();
        std::byte* const on_device = device_rows(filling) + offset_bytes;
        if (array().plan.is_buffered) return stage(filling, of_batch.group, ids, nullptr, on_device);
        std::byte* const side = host_rows(filling) + offset_bytes;
        stage(filling, of_batch.group, ids, side);
        of_batch.group.copies.push_back({on_device, side, count * array().row_bytes()});
    }
    /// Reads the short pieces into short_pieces_, and makes that memory their source.
    /// @return false, with nothing done, if they do not fit.
    bool read_short(const row_run& rows, batch_work& of_batch) {
        std::uint64_t end = of_batch.short_bytes;
        for (const copy_range& piece : of_batch.pieces)
            end += is_short(rows, piece) ? piece.size_bytes : 0;
        if (end > short_pieces_bytes) return false;
        std::byte* const memory = short_pieces_.data() + of_batch.filling.index * short_pieces_bytes;
        for (copy_range& piece : of_batch.pieces) {
            if (!is_short(rows, piece)) continue;
            std::byte* const side = memory + of_batch.short_bytes;
            const auto skipped_bytes = static_cast<std::uint64_t>(piece.source - rows.extent->data);
            static_cast<void>(
                rows.extent->file->read(rows.extent->offset_bytes + skipped_bytes, {side, piece.size_bytes}));
            piece.source = side;
            of_batch.short_bytes += piece.size_bytes;
            note_staged(piece.size_bytes);
        }
        return true;
    }
    bool is_short(const row_run& rows, const copy_range& piece) const {
        return rows.extent->file != nullptr && piece.size_bytes < min_piece_bytes();
    }
    /// Copies registered rows. Rows whose short pieces do not fit into short_pieces_ take the fallback.
    void copy(row_run rows, batch_work& of_batch) {
        const std::uint64_t row_bytes = array().row_bytes();
        const auto part = [&](std::size_t begin, std::size_t end) {
            return row_run{rows.extent, rows.first + begin, end - begin, rows.rows + begin * row_bytes, true};
        };
        while (rows.count != 0) {
            const copy_range whole{device_rows(of_batch.filling) + rows.first * row_bytes, rows.rows,
                                   rows.count * row_bytes};
            const bool is_of_file = rows.extent->file != nullptr;
            if (is_of_file && whole.size_bytes < min_piece_bytes()) return leave(rows, of_batch);
            std::vector<copy_range>& pieces = of_batch.pieces;
            pieces.clear();  // cut at the same boundaries at which the device cuts copies
            if (is_of_file) {
                pin_registry::process().cut({&whole, 1}, pieces);
            } else {
                pieces.push_back(whole);
            }
            if (read_short(rows, of_batch)) {
                stage_left(of_batch);
                of_batch.group.copies.insert(of_batch.group.copies.end(), pieces.begin(), pieces.end());
                return;
            }
            const auto piece =
                std::ranges::find_if(pieces, [&](const copy_range& each) { return is_short(rows, each); });
            const auto begin_bytes = static_cast<std::uint64_t>(piece->source - rows.rows);
            const std::size_t begin = begin_bytes / row_bytes;
            const std::size_t end = (begin_bytes + piece->size_bytes + row_bytes - 1) / row_bytes;
            copy(part(0, begin), of_batch);
            leave(part(begin, end), of_batch);
            rows = part(end, rows.count);
        }
    }

    pinned_buffer short_pieces_;  ///< short_pieces_bytes for each slot
};

/// Gathers rows with a kernel, which reads every row by its address: on its registered page, or in the
/// staging side of the slot.
class kernel_transfer final : public registered_transfer {
 public:
    kernel_transfer(const sample_array& array, const loader_setup& setup)
        : registered_transfer(array, setup),
          part_(array.plan.parts.front()),
          addresses_(setup.slot_count, setup.max_slot_rows, setup.allocator),
          missing_ids_(setup.slot_count),
          is_copied_(setup.slot_count) {
        if (!part_.sorted) return;
        const std::uint64_t row_count = setup.slot_count * setup.max_slot_rows;
        sorted_ = setup.allocator.allocate(row_count * sizeof(std::uint64_t));
        positions_ = setup.allocator.allocate(row_count * sizeof(std::uint32_t));
        const auto extents = array.source->extents();
        const auto [low, high] = std::ranges::minmax_element(extents, {}, &row_extent::data);
        const auto last_rows_bytes = high->row_count * array.row_bytes();
        address_range_ = static_cast<std::uint64_t>(high->data - low->data) + last_rows_bytes;
        const std::uint64_t max_run_rows =
            std::min<std::uint64_t>(setup.slot_count, row_parts::max) * setup.max_slot_rows;
        scratch_ = setup.allocator.allocate(
            setup.device.backend().sort_scratch_bytes(max_run_rows, address_range_, sort_kernels::several));
    }

    void prepare(slot& filling, slot_group& group) override {
        const std::uint64_t row_bytes = array().row_bytes();
        if (row_bytes == 0 || filling.row_ids.empty()) return;
        const std::span<std::uint64_t> addresses = addresses_.of(filling);
        std::vector<std::uint64_t>& missing = missing_ids_[filling.index];
        missing.clear();
        for_runs_of(filling, false, [&](const row_run& row) {
            const std::byte* data = row.rows;
            if (!row.is_registered) {
                data = host_rows(filling) + missing.size() * row_bytes;
                missing.push_back(filling.row_ids[row.first]);
            }
            addresses[row.first] = reinterpret_cast<std::uintptr_t>(data);
        });
        if (!missing.empty()) stage(filling, group, missing, host_rows(filling));
        // if no row is registered, the rows are copied, without a kernel that reads the staging side
        is_copied_[filling.index] = missing.size() == filling.row_ids.size() ? 1 : 0;
        if (is_copied_[filling.index] != 0)
            group.copies.push_back({device_rows(filling), host_rows(filling), missing.size() * row_bytes});
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
            gather.table.addresses_are_aligned = array().is_aligned;
            // equal rows are not detected, but gathered again
            gather.order = part_.sorted ? row_order{sorted_of(*run[0]), positions_of(*run[0]), rows, false}
                                        : row_order{addresses_.on_device(*run[0]), nullptr, rows, false};
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
    std::vector<std::vector<std::uint64_t>> missing_ids_;  ///< for each slot
    /// For each slot: whether all its rows are staged, and copied by the copy engine.
    std::vector<std::uint8_t> is_copied_;
    // of sorted lists
    device_buffer sorted_;
    device_buffer positions_;
    device_buffer scratch_;
    std::uint64_t address_range_ = 0;
};

}  // namespace

std::unique_ptr<array_transfer> make_registered_transfer(const sample_array& array,
                                                         const loader_setup& setup) {
    if (array.plan.main() == transfer::kernel) return std::make_unique<kernel_transfer>(array, setup);
    return std::make_unique<engine_transfer>(array, setup);
}

}  // namespace pinflow::detail
