#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/train/flat_layout.hpp"
#include "src/train/rule_setup.hpp"

namespace pinflow::detail {

/// Lays out the device memory that holds everything but parameters, gradients and state: the control block,
/// the flat_segments, the settings and power tables of the groups, and partial sums of the norm.
class small_buffer {
 public:
    /// @throws as rule_tables::add.
    small_buffer(const flat_layout& layout, std::span<const optimizer> groups);

    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    /// The first contents, for a buffer at `base`.
    std::vector<std::byte> contents(std::byte* base) const;
    /// Sets the pointers to what lies in the buffer at `base`, and the counts that belong to them.
    void point(flat_buffers& buffers, std::byte* base) const noexcept;

 private:
    std::vector<flat_segment> segments_;
    std::vector<rule_numbers> numbers_;
    rule_tables tables_;
    std::uint64_t segments_bytes_ = 0;  ///< where the parts begin
    std::uint64_t numbers_bytes_ = 0;
    std::uint64_t tables_bytes_ = 0;
    std::uint64_t sums_bytes_ = 0;
    std::uint64_t size_bytes_ = 0;
};

}  // namespace pinflow::detail
