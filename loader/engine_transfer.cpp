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

/// Copies each run of contiguous registered rows with one copy. Runs of a file are cut at boundaries between
/// registrations. Pieces there that are too small for the copy engine, mostly a few hundred bytes at the end
/// of a row, are read into a buffer of each slot. If they do not fit, their rows take the
/// fallback. So do unregistered rows and short runs: through shared staging buffers if there are any,
/// otherwise through the staging side of the slot.
class engine_transfer final : public registered_transfer {
 public:
    engine_transfer(sample_array planned, const loader_setup& setup)
        : registered_transfer(std::move(planned), setup),
          part_(array().plan.parts.front()),
          short_pieces_(part_.min_piece_bytes == 0 ? 0 : setup.slot_count * part_.read_piece_bytes,
                        setup.device) {}

    bool needs_cpu() const override { return registered_transfer::needs_cpu() || is_too_short(); }

    void prepare(slot& filling, slot_group& group) override {
        if (array().row_bytes() == 0) return;
        batch_work of_batch{filling, group, {}, 0, 0, 0};
        constexpr std::size_t all = std::numeric_limits<std::size_t>::max();
        for_runs_of(filling, all, [&](const row_run& rows) {
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

    /// Whether rows are shuffled, so that they travel one by one, and too short for the copy engine.
    bool is_too_short() const { return !setup().is_in_order && array().row_bytes() < part_.min_piece_bytes; }

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
        if (array().plan.is_buffered)
            return stage(filling, of_batch.group, {.ids = ids, .on_device = on_device});
        std::byte* const side = host_rows(filling) + offset_bytes;
        stage(filling, of_batch.group, {.ids = ids, .target = side});
        of_batch.group.copies.push_back({on_device, side, count * array().row_bytes()});
    }
    /// Reads the short pieces into short_pieces_, and makes that memory their source.
    /// @return false, with nothing done, if they do not fit.
    bool read_short(const row_run& rows, batch_work& of_batch) {
        std::uint64_t end = of_batch.short_bytes;
        for (const copy_range& piece : of_batch.pieces)
            end += is_short(rows, piece) ? piece.size_bytes : 0;
        if (end > part_.read_piece_bytes) return false;
        std::byte* const memory = short_pieces_.data() + of_batch.filling.index * part_.read_piece_bytes;
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
        return rows.extent->file != nullptr && piece.size_bytes < part_.min_piece_bytes;
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
            if (is_of_file && whole.size_bytes < part_.min_piece_bytes) return leave(rows, of_batch);
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

    transfer_part part_;
    pinned_buffer short_pieces_;  ///< part_.read_piece_bytes for each slot
};

}  // namespace

std::unique_ptr<array_transfer> make_engine_transfer(sample_array array, const loader_setup& setup) {
    return std::make_unique<engine_transfer>(std::move(array), setup);
}

}  // namespace pinflow::detail
