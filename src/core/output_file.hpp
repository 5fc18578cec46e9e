#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace pinflow::detail {

/// A file that appears under its name complete or not at all: it is written to an unnamed file in the same
/// folder (a temporary one if the filesystem has no unnamed files), made durable and then renamed. What
/// was there before is replaced (a symbolic link too, not what it points to). It gets the permissions of the
/// file that it replaces. Small writes are collected. Not thread-safe.
class output_file {
 public:
    /// Creates the file without its name. @throws system_failure when the folder does not allow it, or when
    /// `path` names something that is not a regular file.
    explicit output_file(const std::filesystem::path& path);
    output_file(const output_file&) = delete;
    output_file& operator=(const output_file&) = delete;
    /// Without `commit`, what was written is thrown away.
    ~output_file();

    /// Appends. @throws system_failure; nothing can be written or committed after that.
    void write(std::span<const std::byte> bytes);
    /// Writes over bytes that were written before (a header whose lengths are known at the end), or at any
    /// other offset; where nothing was written, zeros are.
    /// @throws system_failure; nothing can be written or committed after that.
    void write_at(std::uint64_t offset_bytes, std::span<const std::byte> bytes);
    /// Fills `destination` with bytes that were written before, with zeros past their end.
    /// @throws system_failure; nothing can be written or committed after that.
    void read_at(std::uint64_t offset_bytes, std::span<std::byte> destination);
    /// Cuts the file off at that size, or extends it with zeros.
    /// @throws system_failure; nothing can be written or committed after that.
    void resize(std::uint64_t size_bytes);
    /// Makes the file durable and gives it its name; the last call. @throws system_failure.
    void commit();

    /// The path as it was given, for messages.
    const std::string& path() const noexcept { return path_; }

 private:
    /// Runs one step of writing; if it fails, the file is lost for good: after a failed fsync the system may
    /// have dropped the pages, so that a second try would report success without the data.
    template <typename Step>
    void attempt(Step step);
    /// Has `create` make a name in the folder that nothing else has.
    template <typename Create>
    void take_temporary_name(Create create);
    void flush();
    void discard() noexcept;

    std::string path_;
    std::string folder_;
    std::string final_path_;
    std::string temporary_path_;  ///< empty as long as it has no name at all
    int descriptor_ = -1;
    std::vector<std::byte> collected_;
};

}  // namespace pinflow::detail
