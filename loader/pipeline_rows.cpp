#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "loader/pipeline.hpp"
#include "loader/thread_time.hpp"
#include "pinflow/error.hpp"

// How the rows of a batch come into its slot: the stages gather and copy.
namespace pinflow {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::uint64_t gather_piece_bytes = std::uint64_t{1} << 20;  // enough to be worth a task

}  // namespace

void loader::pipeline::gather(detail::slot& slot) {
    slot.arrays.clear();
    slot.copies.clear();
    std::atomic<std::int64_t> storage_ns = 0;
    std::atomic<std::int64_t> total_ns = 0;
    const auto before = clock::now();
    for (std::size_t index = 0; index < sources_.size(); ++index) {
        const row_source& source = *sources_[index];
        shape_vector shape = source.row_shape();
        shape.insert(shape.begin(), slot.row_ids.size());
        if (!route_.device_side) {
            const std::byte* const rows = source.extents()[0].data;
            const std::byte* const first =
                rows == nullptr ? nullptr : rows + slot.row_ids[0] * source.row_size_bytes();
            slot.arrays.emplace_back(first, source.dtype(), std::move(shape));
            continue;
        }
        const std::uint64_t offset = layout_.array_offsets[index];
        slot.arrays.emplace_back(slot.device_side.data() + offset, source.dtype(), std::move(shape));
        if (gathered_by_device(index)) continue;
        std::vector<row_run> missing{{0, slot.row_ids.size()}};
        if (from_pages_[index]) missing = list_copies(slot, index);
        if (missing.empty()) continue;
        if (from_pages_[index] && !route_.host_side) {
            throw unsupported(fmt::format("pages of {} are not registered", source.description()));
        }
        std::byte* const side = (route_.host_side ? slot.host_side.data() : slot.device_side.data()) + offset;
        gather_rows(slot, index, missing, side, storage_ns, total_ns);
        if (from_pages_[index]) {
            for (const row_run& run : missing)
                gathered_bytes_ += run.count * source.row_size_bytes();
        }
        if (!route_.host_side) continue;
        const std::uint64_t row_bytes = source.row_size_bytes();
        for (const row_run& run : missing) {
            slot.copies.push_back({slot.device_side.data() + offset + run.first * row_bytes,
                                   side + run.first * row_bytes, run.count * row_bytes});
        }
    }
    // the pieces ran side by side: the stage's own time is shared out as theirs was
    const std::chrono::nanoseconds wall = clock::now() - before;
    const double waiting =
        total_ns > 0 ? static_cast<double>(storage_ns) / static_cast<double>(total_ns) : 0.0;
    const auto storage =
        std::chrono::duration_cast<std::chrono::nanoseconds>(wall * std::clamp(waiting, 0.0, 1.0));
    slot.times.storage += storage;
    slot.times.cpu += wall - storage;
}

void loader::pipeline::gather_rows(const detail::slot& slot, std::size_t index, std::span<const row_run> runs,
                                   std::byte* destination, std::atomic<std::int64_t>& storage_ns,
                                   std::atomic<std::int64_t>& total_ns) const {
    const row_source& source = *sources_[index];
    const std::uint64_t row_bytes = source.row_size_bytes();
    const std::span<const std::uint64_t> ids = slot.row_ids;
    const auto gather_run = [&](const row_run& run) {
        if (pool_->stopped()) return;  // nobody will see this batch
        const auto before = clock::now();
        std::optional<detail::blocked_timer> timer;
        if (!measures_itself_[index]) timer.emplace();
        auto waited = source.read_rows(ids.subspan(run.first, run.count),
                                       {destination + run.first * row_bytes, run.count * row_bytes});
        if (timer && waited.count() == 0) waited = timer->blocked();
        storage_ns += waited.count();
        total_ns += std::chrono::nanoseconds(clock::now() - before).count();
    };
    const std::size_t rows_a_piece =
        std::max<std::uint64_t>(1, gather_piece_bytes / std::max<std::uint64_t>(1, row_bytes));
    std::vector<row_run> pieces;
    for (const row_run& run : runs) {
        for (std::size_t done = 0; done < run.count; done += rows_a_piece)
            pieces.push_back({run.first + done, std::min(rows_a_piece, run.count - done)});
    }
    if (pieces.size() == 1) {
        gather_run(pieces[0]);
        return;
    }
    // isolated, so that a thread that waits here for the last piece does not begin another batch meanwhile
    tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(
            std::size_t{0}, pieces.size(), [&](std::size_t i) { gather_run(pieces[i]); },
            tbb::simple_partitioner());
    });
}

std::vector<loader::pipeline::row_run> loader::pipeline::list_copies(detail::slot& slot,
                                                                     std::size_t index) const {
    const row_source& source = *sources_[index];
    const std::uint64_t row_bytes = source.row_size_bytes();
    std::vector<row_run> missing;
    if (row_bytes == 0) return missing;
    std::byte* const destination = slot.device_side.data() + layout_.array_offsets[index];
    const std::span<const std::uint64_t> ids = slot.row_ids;
    // rows [first, last) of the batch lie one after the other at `rows`
    const auto list = [&](std::size_t first, std::size_t last, const std::byte* rows) {
        while (first < last) {
            const pin_stretch stretch = pages_->stretch_at(rows, (last - first) * row_bytes);
            std::size_t count = stretch.size_bytes / row_bytes;
            const bool registered = stretch.registered && count > 0;
            if (registered) {
                slot.copies.push_back({destination + first * row_bytes, rows, count * row_bytes});
            } else {
                // a row that is registered in part counts with those that are not
                count = stretch.registered ? 1 : (stretch.size_bytes + row_bytes - 1) / row_bytes;
                if (!missing.empty() && missing.back().first + missing.back().count == first) {
                    missing.back().count += count;
                } else {
                    missing.push_back({first, count});
                }
            }
            first += count;
            rows += count * row_bytes;
        }
    };
    for (std::size_t first = 0; first < ids.size();) {
        std::uint64_t row = ids[first];
        const auto* extent = source.extents().data();
        while (row >= extent->row_count) {
            row -= extent->row_count;
            ++extent;
        }
        // rows that follow each other in the extent are one piece, when all of them are registered
        std::size_t last = first + 1;
        while (last < ids.size() && ids[last] == ids[last - 1] + 1 &&
               row + (last - first) < extent->row_count) {
            ++last;
        }
        list(first, last, extent->data + row * row_bytes);
        first = last;
    }
    return missing;
}

/// Rows that several batches want are asked for together: small ones of large arrays come fast only in the
/// order of their addresses.
void loader::pipeline::gather_on_device(std::span<detail::slot* const> slots) {
    std::vector<row_gather> gathers;
    for (std::size_t index = 0; index < sources_.size(); ++index) {
        if (!gathered_by_device(index)) continue;
        gathers.clear();
        for (const detail::slot* each : slots) {
            gathers.push_back({std::span<const std::uint64_t>(each->row_ids),
                               each->device_side.data() + layout_.array_offsets[index]});
        }
        exchanges_[index]->gather_group_async(gathers, streams_[0]);
    }
}

void loader::pipeline::copy(detail::slot& slot) {
    // what the device gathers for several batches at once is in one stream
    const stream_view stream = streams_[exchanges_.empty() ? slot.number % streams_.size() : 0];
    if (slot.copies.size() == 1) {
        const copy_range& whole = slot.copies[0];
        copy_to_device_async(whole.destination, {whole.source, whole.size_bytes}, stream);
    } else if (!slot.copies.empty()) {
        copy_batch_to_device_async(slot.copies, stream);
    }
    slot.ready.record(stream);
}

}  // namespace pinflow
