#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace pinflow::detail {

/// A file that appears under its name complete or not at all. The data goes to an unnamed file in the same
/// folder (a temporary file if the filesystem has no unnamed files). `commit` makes it durable, renames it,
/// and makes the folder durable. An existing file is replaced, and the new file gets its permissions; a
/// symbolic link is replaced itself, not its target. Small writes are collected. Not thread-safe.
class output_file {
 public:
    /// Creates the file without its name.
    /// @throws system_failure if the folder does not allow it, or if `path` names an object that is not a
    /// regular file.
    explicit output_file(const std::filesystem::path& path);
    output_file(const output_file&) = delete;
    output_file& operator=(const output_file&) = delete;
    /// Discards the file unless `commit` has renamed it.
    ~output_file();

    /// Writes `bytes` after those of earlier calls of `write`.
    /// @throws system_failure; nothing can be written or committed after that.
    void write(std::span<const std::byte> bytes);
    /// Overwrites earlier bytes (a header whose lengths are known at the end), or writes at any other offset.
    /// Gaps are zeros.
    /// @throws system_failure; nothing can be written or committed after that.
    void write_at(std::uint64_t offset_bytes, std::span<const std::byte> bytes);
    /// Fills `destination` with bytes written before, and with zeros past their end.
    /// @throws system_failure; nothing can be written or committed after that.
    void read_at(std::uint64_t offset_bytes, std::span<std::byte> destination);
    /// Truncates the file to that size, or extends it with zeros.
    /// @throws system_failure; nothing can be written or committed after that.
    void resize(std::uint64_t size_bytes);
    /// Makes the file durable and renames it to its path. The last call.
    /// @throws system_failure. If only making the folder durable fails, the new file already has its name,
    /// but may lose it in a power failure.
    void commit();

    /// The path as it was given, for messages.
    const std::string& path() const noexcept { return path_; }

 private:
    /// Runs one step of writing. If it fails, the file is discarded: after a failed fsync the system may have
    /// dropped the pages, and a second fsync would report success without the data.
    template <typename Step>
    void attempt(Step step);
    /// Calls `create` with new names in the folder until one is not in use.
    template <typename Create>
    void take_temporary_name(Create create);
    void flush();
    void discard() noexcept;

    std::string path_;
    std::string folder_;
    std::string final_path_;
    std::string temporary_path_;  ///< empty while the file has no name
    int descriptor_ = -1;
    std::vector<std::byte> collected_;
};

}  // namespace pinflow::detail
