#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/extent_index.hpp"

namespace pinflow::detail {

/// Checks that the files of a loader's rows have not changed since they were opened. For a batch, it checks
/// the files of its rows, each at most every 100 ms, or every 100 us times the number of files of its source
/// if that is longer. A source whose files are not known is checked as a whole. `check_all`, for the end of
/// an epoch, checks all files. Thread-safe.
///
/// A check takes some microseconds, so checks of a source's files take at most a few percent of one core.
class file_checks {
 public:
    explicit file_checks(std::span<const std::shared_ptr<const row_source>> sources);

    /// @throws as row_source::check_unchanged.
    void check_batch(std::span<const std::uint64_t> row_ids);
    /// Checks all files. For a source with 128 files or more, uses the threads of the calling arena.
    /// @throws as row_source::check_unchanged.
    void check_all() const;

 private:
    /// One source. Its files are checked, or the source itself if its files are not known.
    struct checked_source {
        explicit checked_source(std::shared_ptr<const row_source> checked);
        void check_rows(std::span<const std::uint64_t> row_ids, std::chrono::steady_clock::time_point now);

        void check_all() const;

        std::shared_ptr<const row_source> source;
        extent_index extents;
        /// Each file once; empty if the source does not know the file of every row.
        std::vector<const input_file*> files;
        std::chrono::nanoseconds interval;
        std::atomic<std::chrono::steady_clock::rep> next_check = 0;  ///< used if there are no files
    };

    std::vector<std::unique_ptr<checked_source>> sources_;
};

}  // namespace pinflow::detail
