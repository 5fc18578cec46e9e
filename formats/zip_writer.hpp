#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/zip_directory.hpp"
#include "src/core/output_file.hpp"

namespace pinflow::detail {

/// The lowest values that need zip64 records; tests use lower ones.
struct zip64_thresholds {
    std::uint64_t bytes = 0xFFFF'FFFF;
    std::uint64_t entries = 0xFFFF;
};

/// Writes a zip archive of stored members, each aligned as the caller chooses; atomically, as output_file.
/// Its functions throw system_failure as those of output_file. Not thread-safe.
class zip_writer {
 public:
    explicit zip_writer(const std::filesystem::path& path, zip64_thresholds thresholds = {});

    /// Begins a member of `size_bytes`, placed so that its byte number `aligned_byte` is at a multiple of
    /// `alignment_bytes` (at most 32768) in the file.
    /// @throws invalid_argument for a name that is invalid or already used.
    void begin(std::string_view name, std::uint64_t size_bytes, std::uint64_t aligned_byte,
               std::uint64_t alignment_bytes);
    /// Appends to the member.
    void write(std::span<const std::byte> bytes);
    /// Ends the member; all its bytes must have been written.
    void end();
    /// Writes the directory and makes the file durable under its name.
    void finish();

    const std::string& path() const noexcept { return file_.path(); }

 private:
    void append(std::span<const std::byte> bytes);
    bool needs_zip64(std::uint64_t bytes) const noexcept { return bytes >= thresholds_.bytes; }

    zip64_thresholds thresholds_;
    output_file file_;
    std::uint64_t position_bytes_ = 0;
    std::vector<zip_entry> entries_;
    std::set<std::string, std::less<>> names_;
};

}  // namespace pinflow::detail
