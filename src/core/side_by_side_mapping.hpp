#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pinflow/file.hpp"

namespace pinflow::detail {

/// The bytes [begin_bytes, end_bytes) of a file, at least one.
struct file_part {
    std::shared_ptr<const input_file> file;
    std::uint64_t begin_bytes = 0;
    std::uint64_t end_bytes = 0;
};

/// Maps parts of files, shared and read-only, in one address range: the pages of each part directly follow
/// the pages of the part before. So page-locking can register across files, and parts of equal size and
/// offset are at a constant distance.
///
/// The number of mappings of a process is limited (vm.max_map_count). All objects of this class together use
/// at most half of it. If a part exceeds that limit, or if the system refuses to map it, this part and all
/// later parts stay unmapped. Thread-safe once constructed.
class side_by_side_mapping {
 public:
    /// Maps nothing.
    side_by_side_mapping() noexcept;
    /// Maps as many of `parts` as possible.
    /// @throws format_error if a part exceeds the size of its file at opening; data_changed if the file now
    /// ends before the part does; what input_file::lease_descriptor throws.
    explicit side_by_side_mapping(std::span<const file_part> parts);
    side_by_side_mapping(side_by_side_mapping&&) noexcept;
    side_by_side_mapping& operator=(side_by_side_mapping&&) noexcept;
    ~side_by_side_mapping();

    /// The first byte of part number `index`; null if it is not mapped.
    const std::byte* data(std::size_t index) const noexcept { return data_[index]; }

 private:
    struct pages;

    std::unique_ptr<pages> pages_;
    std::vector<const std::byte*> data_;  // of each part
};

/// The maximum number of side-by-side mappings in this process: half of vm.max_map_count.
std::uint64_t max_side_by_side_mappings();

/// For tests: replaces that number for its lifetime. Only one may exist at a time.
class scoped_mapping_limit {
 public:
    explicit scoped_mapping_limit(std::uint64_t max_mappings);
    ~scoped_mapping_limit();
    scoped_mapping_limit(const scoped_mapping_limit&) = delete;
    scoped_mapping_limit& operator=(const scoped_mapping_limit&) = delete;
};

}  // namespace pinflow::detail
