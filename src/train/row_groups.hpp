#pragma once

#include <cstddef>
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

/// Groups equal ids of a batch by a radix sort, least significant digit first, with several threads if there
/// are many ids. For one caller at a time; keeps its memory.
class row_grouper {
 public:
    /// @param ids below row_count; can_group(ids.size(), row_count)
    /// @return the number of different ids.
    std::uint64_t group(std::span<const std::uint64_t> ids, std::uint64_t row_count, const row_groups& to);

    /// Whether an id and its position fit into 64 bits.
    static bool can_group(std::uint64_t id_count, std::uint64_t row_count) noexcept;

 private:
    void sort(unsigned position_bits, std::uint64_t row_count, std::size_t parts);

    std::vector<std::uint64_t> entries_, others_;  ///< the id in the upper bits, its position in the lower
    std::vector<std::uint32_t> counts_;
};

}  // namespace pinflow::detail
