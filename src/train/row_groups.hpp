#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace pinflow::detail {

/// Where row_grouper::group writes. Each list has memory for all ids of the batch, `starts` for one number
/// more.
struct row_groups {
    std::uint64_t* ids = nullptr;        ///< different ones, in ascending order
    std::int64_t* groups = nullptr;      ///< for each position, the index of its id in `ids`
    std::uint32_t* starts = nullptr;     ///< of each id, in `positions`; then the end
    std::uint32_t* positions = nullptr;  ///< sorted by id, those of equal ids in ascending order
};

/// Sorts the ids of a batch by least significant digits. For one thread; keeps its memory.
class row_grouper {
 public:
    /// @param ids below row_count, fewer than 2^32
    /// @return the number of different ids.
    std::uint64_t group(std::span<const std::uint64_t> ids, std::uint64_t row_count, const row_groups& to);

 private:
    struct entry {
        std::uint64_t id;
        std::uint32_t position;
    };
    void sort(std::uint64_t row_count);

    std::vector<entry> entries_, others_;
    std::vector<std::uint32_t> counts_;
};

}  // namespace pinflow::detail
