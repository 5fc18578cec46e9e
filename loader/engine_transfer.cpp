#include <algorithm>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "loader/registered_transfer.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/file.hpp"
#include "src/device/pin_registry.hpp"

namespace pinflow::detail {

namespace {

/// Copies each run of contiguous registered rows: in memory with one copy, in a file with one for each
/// registration that it touches. Pieces there that are too short for the copy engine, mostly a few hundred
/// bytes at the end of a row, are read into a buffer of each slot. If they do not fit, their rows take the
/// fallback. So do unregistered rows and short runs: through shared staging buffers if there are any,
/// otherwise through the staging side of the slot.
class engine_transfer final : public registered_transfer {
 public:
    engine_transfer(sample_array planned, const loader_setup& setup)
        : registered_transfer(std::move(planned), setup),
          part_(array().plan.parts.front()),
          short_pieces_(part_.min_piece_bytes == 0 ? 0 : setup.slot_count * part_.read_piece_bytes,
                        setup.device) {}

    bool needs_cpu() const override { return registered_transfer::needs_cpu() || has_short_runs(); }

    void prepare(slot& filling, slot_group& group) override {
        if (array().row_bytes() == 0) return;
        pending_work work{.filling = filling, .group = group};
        constexpr std::size_t all = std::numeric_limits<std::size_t>::max();
        for_runs_of(filling, all, [&](const row_run& rows) {
            if (!rows.is_registered && array().plan.pages->is_required) refuse_unregistered();
            rows.is_registered ? copy(rows, work) : defer(rows, work);
        });
        stage_deferred(work);
    }

 private:
    /// The work for one batch.
    struct pending_work {
        slot& filling;
        slot_group& group;
        /// Of the current run.
        std::vector<copy_range> pieces = {};  // NOLINT(readability-redundant-member-init): g++ wants it
        // consecutive rows of the batch that will be staged
        std::size_t first_deferred = 0;
        std::size_t deferred_count = 0;
        std::uint64_t short_bytes = 0;  ///< of pieces that were read
    };

    /// Whether rows travel one by one, as the order is not sequential or they are strided, and are too short
    /// for the copy engine.
    bool has_short_runs() const {
        const bool are_alone = !setup().is_in_order || array().facts.is_strided;
        return are_alone && array().row_bytes() < part_.min_piece_bytes;
    }

    /// Leaves rows for the CPU.
    static void defer(const row_run& rows, pending_work& work) {
        if (work.deferred_count == 0) work.first_deferred = rows.first;
        work.deferred_count += rows.count;
    }
    void stage_deferred(pending_work& work) {
        const std::size_t count = std::exchange(work.deferred_count, 0);
        if (count == 0) return;
        slot& filling = work.filling;
        const std::span<const std::uint64_t> ids =
            std::span(filling.row_ids).subspan(work.first_deferred, count);
        const std::uint64_t offset_bytes = work.first_deferred * array().row_bytes();
        std::byte* const on_device = device_rows(filling) + offset_bytes;
        if (array().plan.is_buffered) return stage(filling, work.group, {.ids = ids, .on_device = on_device});
        std::byte* const side = host_rows(filling) + offset_bytes;
        stage(filling, work.group, {.ids = ids, .target = side});
        work.group.copies.push_back({on_device, side, count * array().row_bytes()});
    }
    /// Reads the short pieces into short_pieces_, and makes that memory their source.
    /// @return false, with nothing done, if they do not fit.
    bool read_short(const row_run& rows, pending_work& work) {
        std::uint64_t end = work.short_bytes;
        for (const copy_range& piece : work.pieces)
            end += is_short(rows, piece) ? piece.size_bytes : 0;
        if (end > part_.read_piece_bytes) return false;
        std::byte* const memory = short_pieces_.data() + work.filling.index * part_.read_piece_bytes;
        for (copy_range& piece : work.pieces) {
            if (!is_short(rows, piece)) continue;
            std::byte* const side = memory + work.short_bytes;
            const auto skipped_bytes = static_cast<std::uint64_t>(piece.source - rows.extent->data);
            static_cast<void>(
                rows.extent->file->read(rows.extent->offset_bytes + skipped_bytes, {side, piece.size_bytes}));
            piece.source = side;
            work.short_bytes += piece.size_bytes;
            note_staged(piece.size_bytes);
        }
        return true;
    }
    bool is_short(const row_run& rows, const copy_range& piece) const {
        return rows.extent->file != nullptr && piece.size_bytes < part_.min_piece_bytes;
    }
    /// Copies registered rows. Rows whose short pieces do not fit into short_pieces_ take the fallback.
    void copy(row_run rows, pending_work& work) {
        const std::uint64_t row_bytes = array().row_bytes();
        const auto part = [&](std::size_t begin, std::size_t end) {
            return row_run{.extent = rows.extent,
                           .first = rows.first + begin,
                           .count = end - begin,
                           .rows = rows.rows + begin * row_bytes,
                           .is_registered = true};
        };
        while (rows.count != 0) {
            const copy_range whole{device_rows(work.filling) + rows.first * row_bytes, rows.rows,
                                   rows.count * row_bytes};
            const bool is_of_file = rows.extent->file != nullptr;
            if (is_of_file && whole.size_bytes < part_.min_piece_bytes) return defer(rows, work);
            std::vector<copy_range>& pieces = work.pieces;
            pieces.clear();  // cut at the same boundaries at which the device cuts copies
            if (is_of_file) {
                pin_registry::process().cut({&whole, 1}, pieces);
            } else {
                pieces.push_back(whole);
            }
            if (read_short(rows, work)) {
                stage_deferred(work);
                work.group.copies.insert(work.group.copies.end(), pieces.begin(), pieces.end());
                return;
            }
            const auto piece =
                std::ranges::find_if(pieces, [&](const copy_range& each) { return is_short(rows, each); });
            const auto begin_bytes = static_cast<std::uint64_t>(piece->source - rows.rows);
            const std::size_t begin = begin_bytes / row_bytes;
            const std::size_t end = (begin_bytes + piece->size_bytes + row_bytes - 1) / row_bytes;
            copy(part(0, begin), work);
            defer(part(begin, end), work);
            rows = part(end, rows.count);
        }
    }

    transfer_part part_;
    pinned_buffer short_pieces_;  ///< part_.read_piece_bytes for each slot
};

}  // namespace

std::unique_ptr<array_transfer> make_engine_transfer(sample_array array, const loader_setup& setup) {
    return std::make_unique<engine_transfer>(std::move(array), setup);
}

}  // namespace pinflow::detail
