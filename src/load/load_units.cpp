#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "src/device/backend.hpp"
#include "src/load/chunk_boxes.hpp"
#include "src/load/device_conversions.hpp"
#include "src/load/load_run.hpp"

// load_run: how one unit is read, staged or decoded.

namespace pinflow::detail {

/// The number of bytes to decode between two looks at `stopped_`: more of tensors in Fortran order, because
/// each read touches every column.
std::uint64_t load_run::decode_step_bytes(const load_job& job) const {
    constexpr std::uint64_t max_reordered_bytes = std::uint64_t{256} << 20;
    // a cast reads its elements to memory of the thread first
    if (!opened_.stored[job.tensor].is_fortran_order || job.is_cast()) return load_unit_bytes;
    const axis_range rows = range_of(opened_, job, 0);
    const std::uint64_t row_bytes = job.size_bytes / (rows.end - rows.begin);
    return std::max(max_reordered_bytes / row_bytes * row_bytes, load_unit_bytes);
}

/// Fills memory of the host device.
void load_run::fill(const load_unit& unit, tensor_reader& reader) {
    for (const load_piece& piece : plan_.pieces_of(unit)) {
        std::byte* const target = target_of(piece);
        if (target == nullptr) return;
        const load_job& job = plan_.jobs[piece.job];
        if (unit.is_box) {
            reader.decode_box_on_host(piece, stopped_, start_of(job));
            staged_bytes_ += piece.size_bytes;
        } else if (unit.is_decoded) {
            std::byte* next = target;
            reader.decode(
                piece, decode_step_bytes(job), stopped_,
                [&](std::uint64_t size_bytes) { return std::exchange(next, next + size_bytes); },
                [&](std::uint64_t, std::span<const std::byte> filled) { staged_bytes_ += filled.size(); });
        } else {
            reader.read(job, piece.begin_bytes, {target, piece.size_bytes});
            staged_bytes_ += piece.size_bytes;
        }
    }
}

void load_run::stage(const load_unit& unit, tensor_reader& reader, load_buffers& buffers) {
    if (unit.reads_gaps) return stage_with_gaps(plan_.pieces_of(unit).front(), reader, buffers);
    load_buffer& buffer = buffers.next();
    reader.read(unit, buffer.host.data());
    for (const load_piece& piece : plan_.pieces_of(unit)) {
        if (target_of(piece) == nullptr)
            return;  // before a conversion is enqueued, for which nothing would wait
    }
    std::vector<copy_range> copies;
    for (const load_piece& piece : plan_.pieces_of(unit)) {
        std::byte* const side = buffer.host.data() + piece.unit_offset_bytes;
        const load_job& job = plan_.jobs[piece.job];
        std::byte* const target = target_of(piece);
        if (job.is_converted_by_device) {
            device_.backend().convert_to_device(conversion_of(opened_, job, piece, side, start_of(job)),
                                                copies_.native_handle());
            continue;
        }
        copy_range* const last = copies.empty() ? nullptr : &copies.back();
        const bool is_own = plan_.blocks[job.block].destination == nullptr;
        // the padding between neighbours in a block is copied, too
        const bool follows = last != nullptr && target - last->destination == side - last->source &&
                             target >= last->destination + last->size_bytes &&
                             target < last->destination + last->size_bytes + block_alignment;
        if (follows && is_own && job.block == plan_.jobs[(&piece - 1)->job].block) {
            last->size_bytes = static_cast<std::uint64_t>(side - last->source) + piece.size_bytes;
        } else {
            copies.push_back({target, side, piece.size_bytes});
        }
    }
    if (copies.size() == 1) {
        copy_to_device_async(copies[0].destination, {copies[0].source, copies[0].size_bytes}, copies_);
    } else if (!copies.empty()) {
        copy_batch_to_device_async(copies, copies_);
    }
    buffer.copied.record(copies_);
    for (const load_piece& piece : plan_.pieces_of(unit))
        staged_bytes_ += piece.size_bytes;
}

/// Stages runs of a slice, together with the gaps between them.
void load_run::stage_with_gaps(const load_piece& piece, tensor_reader& reader, load_buffers& buffers) {
    const load_job& job = plan_.jobs[piece.job];
    const stored_span span = span_of(opened_, job, piece);
    const byte_runs runs = runs_of(opened_, job);
    load_buffer& buffer = buffers.next();
    reader.read_range(span.begin.file, span.begin.offset_bytes, buffer.host.bytes().first(span.size_bytes));
    std::byte* const target = target_of(piece);
    if (target == nullptr) return;
    const strided_copy copy{.destination = target,
                            .source = buffer.host.data(),
                            .run_bytes = runs.size_bytes,
                            .stride_bytes = runs.stride_bytes,
                            .run_count = piece.size_bytes / runs.size_bytes};
    device_.backend().copy_strided_to_device(copy, copies_.native_handle());
    buffer.copied.record(copies_);
    staged_bytes_ += piece.size_bytes;
}

void load_run::decode(const load_unit& unit, tensor_reader& reader, load_buffers& buffers) {
    const load_piece& piece = plan_.pieces_of(unit).front();
    std::byte* target = target_of(piece);
    if (target == nullptr) return;
    if (unit.is_box) {
        load_buffer& box = buffers.next();
        reader.decode_box(piece, stopped_, box.host.bytes().first(piece.size_bytes));
        if (stopped_) return;
        device_.backend().convert_to_device(scatter_of(opened_, plan_.jobs[piece.job], piece, box.host.data(),
                                                       start_of(plan_.jobs[piece.job])),
                                            copies_.native_handle());
        box.copied.record(copies_);
        staged_bytes_ += piece.size_bytes;
        return;
    }
    load_buffer* buffer = nullptr;
    reader.decode(
        piece, load_unit_bytes, stopped_,
        [&](std::uint64_t) {
            buffer = &buffers.next();
            return buffer->host.data();
        },
        [&](std::uint64_t begin, std::span<const std::byte> filled) {
            copy_to_device_async(target + begin, filled, copies_);
            buffer->copied.record(copies_);
            staged_bytes_ += filled.size();
        });
}

}  // namespace pinflow::detail
