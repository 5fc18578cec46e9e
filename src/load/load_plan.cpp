#include "src/load/load_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <tuple>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/load/chunk_boxes.hpp"
#include "src/rows/link_profile.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t page_bytes = 64 << 10;  ///< a multiple of the system's pages
/// If less of a file is loaded, it is read, which is as fast.
constexpr std::uint64_t min_mapped_bytes = std::uint64_t{64} << 10;
/// The same while loaded tensors have this many mappings: a process has at most vm.max_map_count (65,530 by
/// default).
constexpr std::uint64_t min_mapped_bytes_of_many = std::uint64_t{1} << 20;
constexpr std::size_t many_mappings = 8192;
std::atomic<std::size_t> mapping_count = 0;
/// The first and the last units of a load are shorter: the link waits for the first ones to be read, and the
/// caller for the last ones to be copied. In loads of up to 64 MiB, all are short; up to 4 MiB, very short.
constexpr std::uint64_t short_unit_bytes = std::uint64_t{1} << 20;
constexpr std::uint64_t short_zone_bytes = 16 * short_unit_bytes;  ///< at either end
constexpr std::uint64_t max_short_load_bytes = 4 * short_zone_bytes;
constexpr std::uint64_t very_short_unit_bytes = std::uint64_t{512} << 10;
constexpr std::uint64_t max_very_short_load_bytes = 8 * very_short_unit_bytes;

/// Makes the blocks, units and pieces of a plan, job by job.
class planner {
 public:
    planner(load_plan& plan, const opened_tensors& opened, const pinflow::device& device)
        : plan_(plan), opened_(opened), device_(device), raw_bytes_(opened.files.size()) {
        plan.mapped.resize(opened.files.size());
        plan.pieces.reserve(plan.jobs.size());
        small_.reserve(plan.jobs.size());
        for (const load_job& job : plan.jobs)
            all_bytes_ += job.size_bytes;
        if (device.kind() != device_kind::host) return;
        for (const load_job& job : plan.jobs) {
            if (job.is_contiguous()) raw_bytes_[opened.stored[job.tensor].file] += job.size_bytes;
        }
    }

    void add(std::uint32_t index) {
        load_job& job = plan_.jobs[index];
        if (job.size_bytes == 0) return;
        const std::uint64_t bytes_before = plan_.total_bytes;
        plan_.total_bytes += job.size_bytes;
        if (place(job)) {
            plan_.mapped_bytes += job.size_bytes;
        } else if (job.is_decoded) {
            const std::uint64_t element_bytes = type_of(opened_, job).size_bytes();
            if (element_bytes > load_unit_bytes && device_.kind() != device_kind::host)
                throw unsupported(
                    fmt::format("cannot load {} to a GPU: each of its elements has {} bytes, and at most {} "
                                "can be decoded",
                                label_of(opened_, job.tensor), element_bytes, load_unit_bytes));
            const stored_tensor& stored = opened_.stored[job.tensor];
            if (stored.is_fortran_order && stored.part_rows == 0) ++plan_.fortran_count;
            plan_.max_chunk_bytes = std::max(plan_.max_chunk_bytes, chunk_bytes_of(stored));
            add_decoded(index);
        } else if (std::max(job.size_bytes, staged_bytes_of(opened_, job, job.size_bytes)) >=
                   min_own_block_bytes) {
            add_pieces(index, bytes_before);
        } else {
            small_.push_back({index, bytes_before});
        }
    }

    /// Makes units of the small tensors, in the order of `add`.
    void finish() {
        for (std::size_t next = 0; next < small_.size();) {
            const load_unit unit = small_unit(next);
            (is_copyable(unit) ? plan_.copyable : plan_.others).push_back(unit);
        }
        plan_.decoded_count = decoded_.size();
        // decoded units take longest, so they come first
        plan_.others.insert(plan_.others.begin(), decoded_.begin(), decoded_.end());
    }

 private:
    /// Makes units of parts along axis 0, if the tensor can be decoded in parts. Each fits into a staging
    /// buffer, if a part can be as small.
    void add_decoded(std::uint32_t index) {
        const load_job& job = plan_.jobs[index];
        if (is_decoded_in_boxes(opened_, job, device_)) {
            return for_each_box(opened_, job, [&](std::uint64_t begin_bytes, std::uint64_t size_bytes) {
                decoded_.push_back({.first_piece = plan_.pieces.size(),
                                    .piece_count = 1,
                                    .is_decoded = true,
                                    .is_box = true});
                plan_.decoded_bytes += std::max(size_bytes, chunk_bytes_of(opened_.stored[job.tensor]));
                plan_.pieces.push_back({.job = index, .begin_bytes = begin_bytes, .size_bytes = size_bytes});
            });
        }
        const stored_tensor& stored = opened_.stored[job.tensor];
        const auto [first, end] = stored.shape.empty() ? axis_range{0, 1} : range_of(opened_, job, 0);
        const std::uint64_t row_bytes = job.size_bytes / (end - first);
        std::uint64_t step = end;
        if (stored.part_rows != 0) {
            const std::uint64_t cost_bytes = std::max(row_bytes, decoded_row_bytes(job));
            step = std::max<std::uint64_t>(load_unit_bytes / cost_bytes / stored.part_rows, 1) *
                   stored.part_rows;
            const std::uint64_t rows =
                rounded_up(end, stored.part_rows) - first / stored.part_rows * stored.part_rows;
            plan_.decoded_bytes += rows * decoded_row_bytes(job);
        } else {
            plan_.decoded_bytes += stored.size_bytes;
        }
        for (std::uint64_t row = first; row < end;) {
            const std::uint64_t next = std::min((row / step + 1) * step, end);
            decoded_.push_back({.first_piece = plan_.pieces.size(), .piece_count = 1, .is_decoded = true});
            plan_.pieces.push_back({.job = index,
                                    .begin_bytes = (row - first) * row_bytes,
                                    .size_bytes = (next - row) * row_bytes});
            row = next;
        }
    }

    /// Bytes that are decoded for each index of axis 0: those of all chunks with elements of the slice.
    std::uint64_t decoded_row_bytes(const load_job& job) const {
        const stored_tensor& stored = opened_.stored[job.tensor];
        std::uint64_t row_bytes = stored.size_bytes / stored.shape[0];
        for (std::size_t axis = 1; axis < stored.shape.size(); ++axis) {
            const std::uint64_t length = stored.shape[axis];
            const std::uint64_t chunk = stored.chunk_shape.empty() ? 1 : stored.chunk_shape[axis];
            const auto [begin, end] = range_of(opened_, job, axis);
            row_bytes =
                row_bytes / length * (std::min(rounded_up(end, chunk), length) - begin / chunk * chunk);
        }
        return row_bytes;
    }

    /// Makes units of one piece each. For a GPU, pieces of a part that is not cast consist of whole runs of
    /// one group, or lie within a run, unless groups are small.
    void add_pieces(std::uint32_t index, std::uint64_t bytes_before) {
        const load_job& job = plan_.jobs[index];
        std::uint64_t run_bytes = job.size_bytes, group_bytes = job.size_bytes;
        std::uint64_t max_piece_bytes = load_unit_bytes;
        bool is_copied = job.is_contiguous();
        bool reads_with_gaps = false;
        const bool is_changed = job.is_cast() || job.is_converted_by_device;
        if (job.has_gaps && !is_changed && device_.kind() != device_kind::host) {
            const byte_runs runs = runs_of(opened_, job);
            if (has_large_groups(runs)) {
                run_bytes = runs.size_bytes;
                group_bytes = runs.group_bytes();
            }
            is_copied = can_copy_runs(runs);
            reads_with_gaps = reads_gaps(runs) && runs.stride_bytes <= load_unit_bytes;
            if (reads_with_gaps) max_piece_bytes = load_unit_bytes / runs.stride_bytes * run_bytes;
        }
        if (job.is_converted_by_device && job.is_cast()) {
            const std::uint64_t stored_bytes = stored_type_of(opened_, job).size_bytes();
            max_piece_bytes =
                std::min(max_piece_bytes, max_piece_bytes / stored_bytes * job.cast->size_bytes());
        }
        for (std::uint64_t begin = 0; begin < job.size_bytes;) {
            const std::uint64_t max_bytes = std::min(max_unit_bytes(bytes_before + begin), max_piece_bytes);
            const std::uint64_t in_run = begin % run_bytes;
            const bool is_within_run = in_run != 0 || run_bytes > max_bytes;
            const std::uint64_t left = is_within_run ? run_bytes - in_run : group_bytes - begin % group_bytes;
            // no last piece is too short for the copy engine
            const bool leaves_short = left > max_bytes && left - max_bytes < thresholds.min_copied_bytes;
            std::uint64_t size_bytes = leaves_short ? max_bytes / 2 : std::min(max_bytes, left);
            if (!is_within_run) size_bytes = std::max(size_bytes / run_bytes, std::uint64_t{1}) * run_bytes;
            auto& units = is_copied ? plan_.copyable : plan_.others;
            units.push_back({.first_piece = plan_.pieces.size(),
                             .piece_count = 1,
                             .reads_gaps = reads_with_gaps && size_bytes > run_bytes});
            plan_.pieces.push_back({.job = index, .begin_bytes = begin, .size_bytes = size_bytes});
            begin += size_bytes;
        }
    }

    /// A job that shares a unit with others.
    struct small_job {
        std::uint32_t index;
        std::uint64_t bytes_before;  ///< of all jobs before it
    };

    /// The maximum size of a unit that begins after so many bytes of the load.
    std::uint64_t max_unit_bytes(std::uint64_t bytes_before) const {
        if (all_bytes_ <= max_very_short_load_bytes) return very_short_unit_bytes;
        const bool is_at_end =
            bytes_before < short_zone_bytes || all_bytes_ - bytes_before <= short_zone_bytes;
        return all_bytes_ <= max_short_load_bytes || is_at_end ? short_unit_bytes : load_unit_bytes;
    }

    /// Sets where a job is delivered. @return whether it is a mapping.
    bool place(load_job& job) {
        if (job.destination != nullptr) {
            job.block = next_block();
            plan_.blocks.push_back({job.size_bytes, job.destination});
            return false;
        }
        if (job.is_contiguous() && can_be_mapped(job)) {
            const file_position place = position_of(opened_, job);
            load_plan::mapped_range& range = plan_.mapped[place.file];
            const std::uint64_t begin = place.offset_bytes / page_bytes * page_bytes;
            const std::uint64_t end = place.offset_bytes + job.size_bytes;
            const bool is_first = range.end_bytes == 0;
            if (is_first) ++new_mappings_;
            range = {is_first ? begin : std::min(range.begin_bytes, begin), std::max(range.end_bytes, end)};
            job.block = next_block();
            plan_.blocks.push_back({job.size_bytes, nullptr, place});
            return true;
        }
        if (job.size_bytes >= min_own_block_bytes) {
            job.block = next_block();
            plan_.blocks.push_back({job.size_bytes});
            return false;
        }
        const std::uint64_t offset =
            shared_block_ ? rounded_up(plan_.blocks[*shared_block_].size_bytes, block_alignment) : 0;
        if (!shared_block_ || offset + job.size_bytes > shared_block_bytes) {
            shared_block_ = next_block();
            plan_.blocks.push_back({job.size_bytes});
        } else {
            plan_.blocks[*shared_block_].size_bytes = offset + job.size_bytes;
            job.block_offset_bytes = offset;
        }
        job.block = *shared_block_;
        return false;
    }

    std::uint32_t next_block() const { return static_cast<std::uint32_t>(plan_.blocks.size()); }

    /// Whether a contiguous tensor is mapped: on the host device, if it is aligned for its type, and enough
    /// of its file is loaded.
    bool can_be_mapped(const load_job& job) const {
        const file_position place = position_of(opened_, job);
        return device_.kind() == device_kind::host && maps_file(place.file) &&
               is_aligned(type_of(opened_, job), place.offset_bytes);
    }

    /// Whether the file is mapped already, or enough of it is loaded. All files of a load share the limit on
    /// mappings with those of earlier loads.
    bool maps_file(std::size_t file) const {
        if (plan_.mapped[file].end_bytes != 0) return true;
        const bool are_many = mapping_count + new_mappings_ >= many_mappings;
        return raw_bytes_[file] >= (are_many ? min_mapped_bytes_of_many : min_mapped_bytes);
    }

    /// One unit of as many small tensors as fit, all of them contiguous or none; moves `next` past them.
    /// Within a block, the staging buffer has the layout of the block, except for tensors that the device
    /// converts.
    load_unit small_unit(std::size_t& next) {
        load_unit unit{plan_.pieces.size()};
        // leaves room for the rest of a run that is too short for the copy engine
        const std::uint64_t max_bytes = std::min(max_unit_bytes(small_[next].bytes_before),
                                                 load_unit_bytes - thresholds.min_engine_bytes);
        std::uint64_t end = 0;
        const load_job* last = nullptr;
        for (; next < small_.size(); ++next) {
            const load_job& job = plan_.jobs[small_[next].index];
            std::uint64_t offset = rounded_up(end, block_alignment);
            const bool is_converted =
                job.is_converted_by_device || (last != nullptr && last->is_converted_by_device);
            if (last != nullptr && last->block == job.block && !is_converted)
                offset = end + (job.block_offset_bytes - (last->block_offset_bytes + last->size_bytes));
            const std::uint64_t staged_bytes = staged_bytes_of(opened_, job, job.size_bytes);
            const bool kinds_differ = last != nullptr && last->is_contiguous() != job.is_contiguous();
            const bool is_full = offset + staged_bytes > max_bytes;
            if (last != nullptr && (kinds_differ || (is_full && !leaves_short_run(*last, next)))) break;
            plan_.pieces.push_back({.job = small_[next].index,
                                    .unit_offset_bytes = static_cast<std::uint32_t>(offset),
                                    .size_bytes = job.size_bytes});
            ++unit.piece_count;
            end = offset + staged_bytes;
            last = &job;
        }
        return unit;
    }

    /// Whether the jobs from `next` on, as far as they follow `last` without a gap, are too short together
    /// for the copy engine.
    bool leaves_short_run(const load_job& last, std::size_t next) const {
        std::uint64_t size_bytes = 0;
        for (const load_job* before = &last; next < small_.size(); ++next) {
            const load_job& job = plan_.jobs[small_[next].index];
            if (!job.is_contiguous() || !follows(*before, job)) break;
            size_bytes += job.size_bytes;
            if (size_bytes >= thresholds.min_engine_bytes) return false;
            before = &job;
        }
        return size_bytes != 0;
    }

    /// Whether every copy of a unit is long enough for the copy engine.
    bool is_copyable(const load_unit& unit) const {
        std::uint64_t length = 0;
        const load_job* last = nullptr;
        for (const load_piece& piece : plan_.pieces_of(unit)) {
            const load_job& job = plan_.jobs[piece.job];
            if (!job.is_contiguous()) return false;
            if (last != nullptr && !follows(*last, job)) {
                if (length < thresholds.min_engine_bytes) return false;
                length = 0;
            }
            length += job.size_bytes;
            last = &job;
        }
        return length >= thresholds.min_engine_bytes;
    }
    /// Whether a job's bytes follow those of another one, both in the file and in the block.
    bool follows(const load_job& first, const load_job& second) const {
        const file_position a = position_of(opened_, first);
        const file_position b = position_of(opened_, second);
        return a.file == b.file && a.offset_bytes + first.size_bytes == b.offset_bytes &&
               first.block == second.block &&
               first.block_offset_bytes + first.size_bytes == second.block_offset_bytes;
    }

    load_plan& plan_;
    const opened_tensors& opened_;
    pinflow::device device_;
    std::optional<std::uint32_t> shared_block_;
    /// For each file, of contiguous tensors and slices as stored. On the host device only.
    std::vector<std::uint64_t> raw_bytes_;
    std::size_t new_mappings_ = 0;
    std::vector<small_job> small_;
    std::uint64_t all_bytes_ = 0;  ///< of all jobs
    std::vector<load_unit> decoded_;
};

}  // namespace

bool is_aligned(const pinflow::dtype& type, std::uint64_t offset_bytes) noexcept {
    const bool is_complex = type.kind() == dtype_kind::complex;
    const std::uint64_t alignment = is_complex ? type.size_bytes() : type.swap_size_bytes();
    return is_multiple(offset_bytes, std::max<std::uint64_t>(alignment, 1));
}

std::uint64_t chunk_bytes_of(const stored_tensor& tensor) noexcept {
    if (tensor.chunk_shape.empty()) return 0;
    std::uint64_t size_bytes = tensor.dtype->size_bytes();
    for (const std::uint64_t length : tensor.chunk_shape)
        size_bytes *= length;
    return size_bytes;
}

bool is_mappable(const stored_tensor& tensor) noexcept {
    return tensor.is_as_delivered() && tensor.size_bytes >= min_mapped_bytes &&
           is_aligned(*tensor.dtype, *tensor.offset_bytes);
}

bool has_many_mappings() noexcept {
    return mapping_count >= many_mappings;
}

void count_mapping() noexcept {
    ++mapping_count;
}

void uncount_mapping() noexcept {
    --mapping_count;
}

load_plan plan_load(const opened_tensors& opened, std::vector<load_job> jobs, const pinflow::device& device) {
    load_plan plan;
    plan.jobs = std::move(jobs);
    // in the order of files and offsets, so that neighbours in a file become neighbours in memory
    const auto place_of = [&](const load_job& job) {
        const file_position place = position_of(opened, job);
        return std::tuple(place.file, place.offset_bytes);
    };
    planner planner(plan, opened, device);
    if (std::ranges::is_sorted(plan.jobs, {}, place_of)) {
        for (std::uint32_t i = 0; i < plan.jobs.size(); ++i)
            planner.add(i);
    } else {
        std::vector<std::uint32_t> order(plan.jobs.size());
        std::iota(order.begin(), order.end(), std::uint32_t{0});
        std::ranges::sort(order, {}, [&](std::uint32_t i) { return std::pair(place_of(plan.jobs[i]), i); });
        for (const std::uint32_t i : order)
            planner.add(i);
    }
    planner.finish();
    const auto begin_of = [&](const load_unit& unit) {
        const load_piece& piece = plan.pieces[unit.first_piece];
        const file_position place = span_of(opened, plan.jobs[piece.job], piece).begin;
        return std::tuple(place.file, place.offset_bytes);
    };
    if (!std::ranges::is_sorted(plan.copyable, {}, begin_of)) std::ranges::sort(plan.copyable, {}, begin_of);
    return plan;
}

}  // namespace pinflow::detail
