#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "pinflow/file.hpp"
#include "pinflow/memory.hpp"

namespace pinflow {

/// How a mapping will be read; passed to madvise.
enum class access_advice { normal, sequential, random, will_need };

/// A read-only shared mapping of a part of a file: the pages of the page cache, without a copy. The bytes
/// stay valid while this object lives, even if the file is renamed or deleted. Thread-safe once constructed.
///
/// If the file is truncated, reading the lost pages from the CPU raises SIGBUS. pinflow copies rows from the
/// mapping only under the fault guard (install_fault_guard). Otherwise it reads them with input_file::read.
/// Views of the mapping (array::view) are not protected.
class mapped_file {
 public:
    /// Maps [offset_bytes, offset_bytes + size_bytes) of `file`. The offset needs no alignment. A size of 0
    /// maps nothing.
    /// @throws invalid_argument for a null pointer; format_error if the range passes the end of the file.
    /// @throws system_failure if the system refuses (address space, map count).
    mapped_file(std::shared_ptr<const input_file> file, std::uint64_t offset_bytes, std::uint64_t size_bytes);

    const std::shared_ptr<const input_file>& file() const noexcept { return file_; }
    std::uint64_t offset_bytes() const noexcept { return offset_bytes_; }
    /// The first mapped byte; null if nothing is mapped.
    const std::byte* data() const noexcept { return region_.data(); }
    std::uint64_t size_bytes() const noexcept { return region_.size_bytes(); }
    std::span<const std::byte> bytes() const noexcept { return region_.bytes(); }

    /// Tells the system how the pages will be read; a hint, never an error.
    void advise(access_advice advice) const noexcept;

 private:
    std::shared_ptr<const input_file> file_;
    std::uint64_t offset_bytes_;
    memory_region region_;
};

}  // namespace pinflow
