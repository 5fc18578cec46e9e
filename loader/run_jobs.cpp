#include "loader/run_jobs.hpp"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "src/core/descriptor_cache.hpp"
#include "src/core/read_stop.hpp"

namespace pinflow::detail {

namespace {

using run_clock = std::chrono::steady_clock;

/// The most work of a task whose rows do not pass through a staging buffer. Work is measured in bytes to
/// copy.
constexpr std::uint64_t max_fill_task_work = std::uint64_t{1} << 20;
/// A row that is not contiguous with the one before takes at least as long as copying this many bytes.
constexpr std::uint64_t min_work_of_row = 128;
/// The same for rows that pass through a staging buffer: copies from the buffers should be long, too.
constexpr std::uint64_t min_work_of_buffered_row = 32;

/// The jobs of a group in parts, as tasks for threads.
class fill_tasks {
 public:
    fill_tasks(std::span<const read_job> jobs, std::uint64_t buffer_bytes) : buffer_bytes_(buffer_bytes) {
        for (const read_job& job : jobs)
            cut(job);
        // small parts share one task
        for (std::size_t first = 0; first < parts_.size();) {
            const read_job& begin = parts_[first];
            std::uint64_t work = work_of(begin);
            std::size_t last = first + 1;
            while (last < parts_.size() && parts_[last].is_buffered() == begin.is_buffered() &&
                   work + work_of(parts_[last]) <= max_work(begin))
                work += work_of(parts_[last++]);
            tasks_.emplace_back(parts_.data() + first, last - first);
            first = last;
        }
    }
    std::size_t size() const noexcept { return tasks_.size(); }
    std::span<const read_job> operator[](std::size_t i) const noexcept { return tasks_[i]; }

 private:
    static std::uint64_t work_of_row(const read_job& job) {
        const row_source& source = job.reader->source();
        // if rows repeat, it may be wrong, which does no harm
        const bool is_contiguous =
            job.reader->is_contiguous() && job.ids.back() - job.ids.front() == job.ids.size() - 1;
        // a source that decodes its rows may decode a chunk of them again for each call: no smaller tasks
        const bool is_decoded = source.extents().empty();
        const std::uint64_t min_work = is_contiguous || is_decoded ? 1
                                       : job.is_buffered()         ? min_work_of_buffered_row
                                                                   : min_work_of_row;
        return std::max(source.row_size_bytes(), min_work);
    }
    static std::uint64_t work_of(const read_job& job) { return job.ids.size() * work_of_row(job); }
    /// The most work of a task that begins with this job. The rows of a buffered one fit into a buffer.
    std::uint64_t max_work(const read_job& job) const {
        return job.is_buffered() ? buffer_bytes_ : max_fill_task_work;
    }
    void cut(const read_job& job) {
        if (job.ids.empty()) return;
        const std::size_t rows = std::max<std::uint64_t>(1, max_work(job) / work_of_row(job));
        for (std::size_t first = 0; first < job.ids.size(); first += rows)
            parts_.push_back(job.part(first, std::min(rows, job.ids.size() - first)));
    }

    std::uint64_t buffer_bytes_;
    std::vector<read_job> parts_;
    std::vector<std::span<const read_job>> tasks_;  // of parts_
};

/// Runs tasks of one group on any number of threads, and measures what they wait for.
class job_run {
 public:
    job_run(const slot_pool& pool, staging_buffers* buffers, stream_view copies)
        : pool_(pool), buffers_(buffers), copies_(copies) {}

    void run(std::span<const read_job> task) {
        const auto before = run_clock::now();
        const std::chrono::nanoseconds opening_before = time_spent_opening();
        read_session session;
        if (buffers_ != nullptr && task.front().is_buffered()) {
            fill_buffer(task, session);
        } else {
            for (const read_job& job : task)
                read(job, job.destination, session);
        }
        files_ns_ += (time_spent_opening() - opening_before).count();
        total_ns_ += std::chrono::nanoseconds(run_clock::now() - before).count();
    }

    /// Divides the wall time of all tasks equally among the slots, and each slot's part by cause, in
    /// proportion to what the tasks waited for.
    void note_times(std::span<slot* const> slots, std::chrono::nanoseconds wall_time) const {
        const std::chrono::nanoseconds wall = wall_time / slots.size();
        std::chrono::nanoseconds left = wall;
        const auto take_share = [&](std::int64_t part_ns) {
            const double share =
                total_ns_ > 0 ? static_cast<double>(part_ns) / static_cast<double>(total_ns_) : 0.0;
            const auto part =
                std::chrono::duration_cast<std::chrono::nanoseconds>(wall * std::clamp(share, 0.0, 1.0));
            const std::chrono::nanoseconds taken = std::min(part, left);
            left -= taken;
            return taken;
        };
        const std::chrono::nanoseconds files = take_share(files_ns_);
        const std::chrono::nanoseconds storage = take_share(storage_ns_);
        const std::chrono::nanoseconds link = take_share(link_ns_);
        for (slot* const each : slots) {
            each->times.files += files;
            each->times.storage += storage;
            each->times.link += link;
            each->times.cpu += left;
        }
    }

 private:
    /// @return whether all rows were read.
    bool read(const read_job& job, std::byte* destination, read_session& session) {
        if (pool_.stopped()) return false;  // this batch will not be delivered
        try {
            const read_stop stop(is_stopped_);
            storage_ns_ += job.reader->read(job.ids, destination, session).count();
            return true;
        } catch (...) {
            set_error(job);
            return false;
        }
    }

    void fill_buffer(std::span<const read_job> task, read_session& session) {
        try {
            const auto asked = run_clock::now();
            const staging_buffers::lease buffer = buffers_->take();
            link_ns_ += std::chrono::nanoseconds(run_clock::now() - asked).count();
            std::vector<copy_range> filled;
            std::byte* next = buffer.data();
            for (const read_job& job : task) {
                // isolated: a source may use threads, and while it waits for them this one must not take
                // another buffer
                bool is_read = false;
                tbb::this_task_arena::isolate([&] { is_read = read(job, next, session); });
                if (!is_read) continue;
                filled.push_back({job.on_device, next, job.size_bytes()});
                next += job.size_bytes();
            }
            const auto before = run_clock::now();
            if (filled.size() == 1) {
                copy_to_device_async(filled[0].destination, {filled[0].source, filled[0].size_bytes},
                                     copies_);
            } else if (!filled.empty()) {
                copy_batch_to_device_async(filled, copies_);
            }
            buffer.record(copies_);
            link_ns_ += std::chrono::nanoseconds(run_clock::now() - before).count();
        } catch (...) {
            set_error(task.front());
        }
    }

    void set_error(const read_job& job) {
        const std::lock_guard lock(errors_);
        if (!job.filling->error) job.filling->error = std::current_exception();
    }

    const slot_pool& pool_;
    const std::function<bool()> is_stopped_ = [this] { return pool_.stopped(); };
    staging_buffers* buffers_;
    stream_view copies_;
    std::mutex errors_;
    std::atomic<std::int64_t> storage_ns_ = 0;
    std::atomic<std::int64_t> files_ns_ = 0;  // reopening closed files
    std::atomic<std::int64_t> link_ns_ = 0;   // waiting for earlier copies, and enqueueing
    std::atomic<std::int64_t> total_ns_ = 0;
};

}  // namespace

void run_jobs(slot_group& group, const slot_pool& pool, staging_buffers* buffers, stream_view copies) {
    if (group.jobs.empty()) return;
    const fill_tasks tasks(group.jobs, buffers == nullptr ? 0 : buffers->buffer_bytes());
    job_run run(pool, buffers, copies);
    const auto before = run_clock::now();
    if (tasks.size() == 1) {
        run.run(tasks[0]);
    } else {
        // isolated, so that a thread that waits here for the last part does not begin another group meanwhile
        tbb::this_task_arena::isolate([&] {
            tbb::parallel_for(
                std::size_t{0}, tasks.size(), [&](std::size_t i) { run.run(tasks[i]); },
                tbb::simple_partitioner());
        });
    }
    run.note_times(group.slots, run_clock::now() - before);
}

}  // namespace pinflow::detail
