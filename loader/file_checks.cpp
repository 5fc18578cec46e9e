#include "loader/file_checks.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "pinflow/file.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

constexpr std::chrono::milliseconds min_interval{100};
constexpr std::chrono::microseconds file_interval{100};
/// A source whose files are not known is checked as a whole. The pause after a check is at least this many
/// times as long as the check, so that checks take at most 2 % of the time.
constexpr int min_pause_factor = 50;

/// The files of the rows of `source`, each once; empty if the file of some row is not known.
std::vector<const input_file*> files_of(const row_source& source) {
    std::vector<const input_file*> files;
    for (const row_extent& extent : source.extents()) {
        if (extent.file == nullptr) return {};
        files.push_back(extent.file.get());
    }
    std::ranges::sort(files);
    files.erase(std::ranges::unique(files).begin(), files.end());
    return files;
}

}  // namespace

file_checks::checked_source::checked_source(std::shared_ptr<const row_source> checked)
    : source(std::move(checked)),
      extents(source->extents()),
      files(files_of(*source)),
      interval(std::max<std::chrono::nanoseconds>(min_interval, file_interval * files.size())) {}

file_checks::file_checks(std::span<const std::shared_ptr<const row_source>> sources) {
    for (const auto& source : sources)
        sources_.push_back(std::make_unique<checked_source>(source));
}

void file_checks::checked_source::check_rows(std::span<const std::uint64_t> row_ids,
                                             std::chrono::steady_clock::time_point now) {
    if (files.size() == 1) return files[0]->check_unchanged(interval, now);
    if (!files.empty()) {
        for (const std::uint64_t row : row_ids)
            extents.find(row).extent->file->check_unchanged(interval, now);
        return;
    }
    const auto at = now.time_since_epoch().count();
    auto next = next_check.load(std::memory_order_relaxed);
    // only one of several threads checks
    if (at < next || !next_check.compare_exchange_strong(next, std::numeric_limits<decltype(next)>::max(),
                                                         std::memory_order_relaxed))
        return;
    source->check_unchanged();
    const auto end = std::chrono::steady_clock::now();
    const auto pause =
        std::max<std::chrono::steady_clock::duration>(interval, (end - now) * min_pause_factor);
    next_check.store((end + pause).time_since_epoch().count(), std::memory_order_relaxed);
}

void file_checks::checked_source::check_all() const {
    constexpr std::size_t task_files = 64;
    if (files.size() < 2 * task_files) {
        // also for sources without known files
        return source->check_unchanged();
    }
    run_in_parallel((files.size() + task_files - 1) / task_files, [&](std::size_t task) {
        const std::size_t begin = task * task_files;
        for (std::size_t i = begin; i != std::min(begin + task_files, files.size()); ++i)
            files[i]->check_unchanged();
    });
}

void file_checks::check_batch(std::span<const std::uint64_t> row_ids) {
    if (row_ids.empty()) return;
    const auto now = std::chrono::steady_clock::now();
    for (const auto& each : sources_)
        each->check_rows(row_ids, now);
}

void file_checks::check_all() const {
    for (const auto& each : sources_)
        each->check_all();
}

}  // namespace pinflow::detail
