#include <algorithm>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"
#include "src/device/copy_ranges.hpp"
#include "src/device/pin_registry.hpp"
#include "src/load/load_run.hpp"
#include "src/rows/link_profile.hpp"

// The part of a load that copies from page-locked pages.

namespace pinflow::detail {

namespace {

constexpr std::chrono::milliseconds look_interval{1};
/// Units that the copy engine takes at once.
constexpr std::size_t max_joined_units = 16;

}  // namespace

/// Whether a unit of the copy engine consists of short runs of a slice.
bool load_run::has_short_runs(const load_unit& unit) const {
    const load_job& job = plan_.jobs[plan_.pieces_of(unit).front().job];
    return job.has_gaps && !are_long(runs_of(opened_, job));
}

/// The copies of a unit, joined within each block. Of a unit with short runs: one range with the gaps
/// between them, for copy_short_runs. It must not be copied as it is.
std::vector<copy_range> load_run::ranges_of(const load_unit& unit) const {
    std::vector<copy_range> ranges;
    std::optional<std::size_t> last_block;
    for (const load_piece& piece : plan_.pieces_of(unit)) {
        const load_job& job = plan_.jobs[piece.job];
        const auto add = [&](const stored_span& bytes, std::uint64_t begin_bytes) {
            const copy_range next{addresses_[job.block] + job.block_offset_bytes + begin_bytes,
                                  pages_->data_of(bytes.begin.file) + bytes.begin.offset_bytes,
                                  bytes.size_bytes};
            if (last_block == job.block) {
                append_joined(ranges, next);
            } else {
                ranges.push_back(next);
            }
            last_block = job.block;
        };
        if (has_short_runs(unit)) {
            add(span_of(opened_, job, piece), piece.begin_bytes);
        } else {
            for_each_run(opened_, job, piece, add);
        }
    }
    return ranges;
}

/// Copies from the front of the files, as pages are registered, until the threads have taken the rest.
void load_run::copy_from_pages() {
    std::vector<copy_range> batch;
    std::size_t last_block = 0;  // of the batch
    const auto enqueue = [&] {
        if (batch.empty()) return;
        copy_batch_to_device_async(batch, copies_);
        for (const copy_range& range : batch)
            copied_bytes_ += range.size_bytes;
        batch.clear();
    };
    std::size_t joined = 0;
    while (const load_unit* const unit = queue_.front()) {
        if (stopped_) return;
        const std::vector<copy_range> ranges = ranges_of(*unit);
        if (!pages_->cover(ranges)) {
            enqueue();
            joined = 0;
            say_progress();
            if (pages_->wait_for(ranges, look_interval)) continue;
            if (queue_.is_empty()) return;
            if (options_.route == load_route::copy) pages_->require();
            rest_is_staged_ = true;
            queue_.stop_copies();
            start_threads(way_.threads_without_pages);
            return;
        }
        if (!queue_.take_front()) break;
        if (has_short_runs(*unit)) {
            copy_short_runs(*unit, ranges.front());
        } else if (has_short_pieces(ranges)) {
            stage_here(*unit);
        } else {
            const std::span<const load_piece> of_unit = plan_.pieces_of(*unit);
            const bool continues = !batch.empty() && block_of(of_unit.front()) == last_block;
            if (continues) append_joined(batch, ranges.front());
            batch.insert(batch.end(), ranges.begin() + (continues ? 1 : 0), ranges.end());
            last_block = block_of(of_unit.back());
        }
        if (++joined < max_joined_units) continue;
        enqueue();
        joined = 0;
        say_progress();
    }
    enqueue();
}

/// Whether boundaries of registrations cut off pieces that are not for the copy engine: see link_profile.hpp.
bool load_run::has_short_pieces(std::span<const copy_range> ranges) {
    std::vector<copy_range> pieces;
    pin_registry::process().cut(ranges, pieces);
    return std::ranges::any_of(
        pieces, [](const copy_range& piece) { return piece.size_bytes < thresholds.min_copied_bytes; });
}

/// Copies a unit of short runs, by one strided copy for each registration. Runs across a boundary, and too
/// few bytes for the copy engine, go to stage_here: the CPU would copy a single run itself, and if the file
/// is truncated, that would end the process.
/// @param span the pages of the runs and of the gaps between them, and the destination of the first run
void load_run::copy_short_runs(const load_unit& unit, const copy_range& span) {
    const load_piece& piece = plan_.pieces_of(unit).front();
    const byte_runs runs = runs_of(opened_, plan_.jobs[piece.job]);
    const std::uint64_t count = piece.size_bytes / runs.size_bytes;
    std::vector<copy_range> parts;  // of the pages, one for each registration
    pin_registry::process().cut({&span, 1}, parts);
    std::uint64_t done = 0;
    for (const copy_range& part : parts) {
        const auto end = static_cast<std::uint64_t>(part.source + part.size_bytes - span.source);
        const bool has_run = end >= runs.size_bytes;
        std::uint64_t next = has_run ? (end - runs.size_bytes) / runs.stride_bytes + 1 : 0;
        next = std::clamp(next, done, count);
        const strided_copy copy{.destination = span.destination + done * runs.size_bytes,
                                .source = span.source + done * runs.stride_bytes,
                                .run_bytes = runs.size_bytes,
                                .stride_bytes = runs.stride_bytes,
                                .run_count = next - done};
        if (copy.size_bytes() >= thresholds.min_copied_bytes) {
            device_.backend().copy_strided_to_device(copy, copies_.native_handle());
            copied_bytes_ += copy.size_bytes();
            done = next;
        }
        if (next < count && next * runs.stride_bytes < end) ++next;  // the run goes on in the next part
        stage_here({.job = piece.job,
                    .begin_bytes = piece.begin_bytes + done * runs.size_bytes,
                    .size_bytes = (next - done) * runs.size_bytes});
        done = next;
    }
}

/// Stages a unit on the calling thread.
void load_run::stage_here(const load_unit& unit) {
    if (load_buffers* const buffers = own_buffers()) return stage(unit, own_reader_, *buffers);
    for (const load_piece& piece : plan_.pieces_of(unit))
        stage_here(piece);
}

/// Stages a piece, or nothing, on the calling thread: without page-locked memory through memory of the heap.
void load_run::stage_here(const load_piece& piece) {
    if (piece.size_bytes == 0) return;
    std::byte* const target = target_of(piece);
    if (target == nullptr) return;
    const load_job& job = plan_.jobs[piece.job];
    if (load_buffers* const buffers = own_buffers()) {
        load_buffer& buffer = buffers->next();
        const std::span<std::byte> bytes = buffer.host.bytes().first(piece.size_bytes);
        own_reader_.read(job, piece.begin_bytes, bytes);
        copy_to_device_async(target, bytes, copies_);
        buffer.copied.record(copies_);
    } else {
        std::vector<std::byte> bytes(piece.size_bytes);
        own_reader_.read(job, piece.begin_bytes, bytes);
        copy_to_device_async(target, bytes, copies_);
        copies_.synchronize();
    }
    staged_bytes_ += piece.size_bytes;
}

/// The staging buffers of the calling thread. Null if no memory can be page-locked for them.
load_buffers* load_run::own_buffers() {
    if (own_buffers_) return &*own_buffers_;
    if (own_buffers_failed_) return nullptr;
    try {
        return &own_buffers_.emplace(device_);
    } catch (const error&) {
        own_buffers_failed_ = true;
        return nullptr;
    }
}

}  // namespace pinflow::detail
