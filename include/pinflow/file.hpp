#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace pinflow {

/// What tells a file, and one state of it, from others.
struct file_identity {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::uint64_t size_bytes = 0;
    std::int64_t modified_ns = 0;  ///< modification time, since 1970

    friend bool operator==(const file_identity&, const file_identity&) = default;
};

/// A regular file opened for reading, with the identity it had when it was opened. Never writes, never blocks
/// on a FIFO. Every member may be called from any thread at the same time.
class input_file {
 public:
    /// Opens `path`. @throws system_failure when it cannot be opened, format_error when it is not a regular
    /// file.
    explicit input_file(const std::filesystem::path& path);
    input_file(const input_file&) = delete;
    input_file& operator=(const input_file&) = delete;
    ~input_file();

    /// The path as it was given, for messages.
    const std::string& path() const noexcept { return path_; }
    /// Size when the file was opened.
    std::uint64_t size_bytes() const noexcept { return identity_.size_bytes; }
    /// What it was when it was opened.
    const file_identity& identity() const noexcept { return identity_; }
    int descriptor() const noexcept { return descriptor_; }

    /// Fills `destination` from the page cache or the disk.
    /// @return the time spent waiting for storage: zero when every byte was in the page cache.
    /// @throws system_failure when reading fails, data_changed when the file ends before the destination is
    /// full.
    std::chrono::nanoseconds read(std::uint64_t offset_bytes, std::span<std::byte> destination) const;

    /// @throws data_changed when size or modification time differ from those at opening, or when another file
    /// has taken the path's place. A file whose name is merely gone still holds its data and passes.
    void check_unchanged() const;

 private:
    std::string path_;
    std::string absolute_path_;
    int descriptor_ = -1;
    file_identity identity_;
};

}  // namespace pinflow
