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

/// Parts of files, mapped shared and read-only in one range of addresses: the pages of one part follow those
/// of the part before, in order, with nothing between them. So page-locking can register across files, and
/// parts of equal size and offset lie at a constant distance.
///
/// The mappings of a process are limited (vm.max_map_count). These take at most half of them in the whole
/// process. The parts that are mapped are always the first ones: from the part on that passes that limit, or
/// that the system refuses to map, none is. Thread-safe once constructed.
class side_by_side_mapping {
 public:
    /// Maps nothing.
    side_by_side_mapping() noexcept;
    /// Maps what it can of `parts`.
    /// @throws format_error when a part passes the end that its file had when it was opened, data_changed
    /// when the file is shorter by now; what input_file::lease_descriptor throws.
    explicit side_by_side_mapping(std::span<const file_part> parts);
    side_by_side_mapping(side_by_side_mapping&&) noexcept;
    side_by_side_mapping& operator=(side_by_side_mapping&&) noexcept;
    ~side_by_side_mapping();

    /// Where part number `index` begins; null when it is not mapped.
    const std::byte* data(std::size_t index) const noexcept { return data_[index]; }

 private:
    struct pages;

    std::unique_ptr<pages> pages_;
    std::vector<const std::byte*> data_;  // of each part
};

/// How many files this process may have mapped side by side: half of vm.max_map_count.
std::uint64_t max_side_by_side_mappings();

/// For tests: replaces that number for its lifetime; one at a time.
class scoped_mapping_limit {
 public:
    explicit scoped_mapping_limit(std::uint64_t max_mappings);
    ~scoped_mapping_limit();
    scoped_mapping_limit(const scoped_mapping_limit&) = delete;
    scoped_mapping_limit& operator=(const scoped_mapping_limit&) = delete;
};

}  // namespace pinflow::detail
