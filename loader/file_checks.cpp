#include "loader/file_checks.hpp"

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <utility>

#include "pinflow/file.hpp"

namespace pinflow::detail {

file_checks::checked_source::checked_source(std::shared_ptr<const row_source> checked)
    : source(std::move(checked)),
      extents(source->extents()),
      has_files(!source->extents().empty() &&
                std::ranges::all_of(source->extents(),
                                    [](const row_extent& extent) { return extent.file != nullptr; })) {}

file_checks::file_checks(std::span<const std::shared_ptr<const row_source>> sources) {
    for (const auto& source : sources)
        sources_.push_back(std::make_unique<checked_source>(source));
}

void file_checks::checked_source::check_rows(std::span<const std::uint64_t> row_ids,
                                             std::chrono::steady_clock::time_point now) {
    if (has_files) {
        const bool is_one_file = source->extents().size() == 1;
        for (const std::uint64_t row : is_one_file ? row_ids.first(1) : row_ids)
            extents.find(row).extent->file->check_unchanged(interval, now);
        return;
    }
    const auto at = now.time_since_epoch().count();
    auto last = last_check.load(std::memory_order_relaxed);
    const bool is_due =
        last == 0 || now.time_since_epoch() - std::chrono::steady_clock::duration(last) >= interval;
    // of several threads one checks
    if (is_due && last_check.compare_exchange_strong(last, at, std::memory_order_relaxed))
        source->check_unchanged();
}

void file_checks::check_batch(std::span<const std::uint64_t> row_ids) {
    if (row_ids.empty()) return;
    const auto now = std::chrono::steady_clock::now();
    for (const auto& each : sources_)
        each->check_rows(row_ids, now);
}

void file_checks::check_all() const {
    constexpr std::size_t files_of_task = 64;
    for (const auto& each : sources_) {
        const std::span<const row_extent> extents = each->source->extents();
        if (!each->has_files || extents.size() < 2 * files_of_task) {
            each->source->check_unchanged();
            continue;
        }
        tbb::this_task_arena::isolate([&] {
            tbb::parallel_for(tbb::blocked_range<std::size_t>(0, extents.size(), files_of_task),
                              [&](const tbb::blocked_range<std::size_t>& part) {
                                  for (std::size_t i = part.begin(); i != part.end(); ++i)
                                      extents[i].file->check_unchanged();
                              });
        });
    }
}

}  // namespace pinflow::detail
