#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pinflow/row_source.hpp"
#include "src/core/extent_index.hpp"

namespace pinflow::detail {

/// Looks whether what the rows of a loader are read from is still what was opened: of a batch the files that
/// its rows lie in, each at most every `interval`; at the end of an epoch all files. Thread-safe.
class file_checks {
 public:
    static constexpr std::chrono::milliseconds interval{100};

    explicit file_checks(std::span<const std::shared_ptr<const row_source>> sources);

    /// @throws as row_source::check_unchanged.
    void check_batch(std::span<const std::uint64_t> row_ids);
    /// By all cores. @throws as row_source::check_unchanged.
    void check_all() const;

 private:
    /// One source: its files, or, if they are not known, the source itself.
    struct checked_source {
        explicit checked_source(std::shared_ptr<const row_source> checked);
        void check_rows(std::span<const std::uint64_t> row_ids, std::chrono::steady_clock::time_point now);

        std::shared_ptr<const row_source> source;
        extent_index extents;
        bool has_files;
        std::atomic<std::chrono::steady_clock::rep> last_check = 0;  ///< without files
    };

    std::vector<std::unique_ptr<checked_source>> sources_;
};

}  // namespace pinflow::detail
