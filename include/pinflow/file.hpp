#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace pinflow {

namespace detail {

class cached_descriptor;

}  // namespace detail

/// Identifies a file and one state of its contents.
struct file_identity {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::uint64_t size_bytes = 0;
    std::int64_t modified_ns = 0;  ///< modification time, since 1970

    friend bool operator==(const file_identity&, const file_identity&) = default;
};

/// Keeps the descriptor of an input_file open. The file must outlive it. A moved-from lease is empty.
class descriptor_lease {
 public:
    /// The descriptor, for reading; -1 if the lease is empty. Its file position is undefined: use pread.
    int get() const noexcept;

 private:
    friend class input_file;
    struct end_use {
        void operator()(detail::cached_descriptor* used) const noexcept;
    };
    explicit descriptor_lease(detail::cached_descriptor& used) noexcept : used_(&used) {}

    std::unique_ptr<detail::cached_descriptor, end_use> used_;
};

/// What counts as a change of an input_file.
enum class change_check {
    path,  ///< another file at its path, another size or modification time
    /// Another size or modification time of the opened file itself. Its descriptor stays open, so that it may
    /// be renamed, replaced or deleted.
    file,
    /// Another size of the opened file. Its modification time is not compared, so other processes may write
    /// to it.
    size,
};

/// A regular file opened for reading, with the identity it had when it was opened. Never writes, never blocks
/// on a FIFO. Every member may be called from any thread at the same time.
///
/// The input_files of a process keep at most half of RLIMIT_NOFILE descriptors open, or 16 if that is more,
/// unless more are in use. When more are needed, pinflow raises the soft limit of the process towards the
/// hard limit, to 65,536 at most. Beyond that, descriptors not used recently are closed, and reopened when
/// needed. Reopening checks that it is still the same file.
class input_file {
 public:
    /// Opens `path`.
    /// @throws system_failure if it cannot be opened.
    /// @throws format_error if it is not a regular file.
    explicit input_file(const std::filesystem::path& path, change_check check = change_check::path);
    input_file(const input_file&) = delete;
    input_file& operator=(const input_file&) = delete;
    ~input_file();

    /// The path as it was given, for messages.
    const std::string& path() const noexcept { return path_; }
    /// The size of the file when it was opened.
    std::uint64_t size_bytes() const noexcept { return identity_.size_bytes; }
    /// The identity of the file when it was opened.
    const file_identity& identity() const noexcept { return identity_; }

    /// Keeps the descriptor open while the lease lives.
    /// @throws data_changed if the file must be reopened and has changed or been replaced by then.
    /// @throws system_failure if it cannot be reopened.
    descriptor_lease lease_descriptor() const;

    /// Fills `destination` from the page cache or the disk.
    /// @return the time spent waiting for storage. It is zero if the system confirms that every byte was in
    /// the page cache (RWF_NOWAIT). Other bytes count with the wall time minus the CPU time of their reads,
    /// which may be a little above zero for cached bytes.
    /// @throws system_failure if reading fails; invalid_argument for bytes past the end of the file, or
    /// data_changed if its size has changed; what lease_descriptor throws.
    std::chrono::nanoseconds read(std::uint64_t offset_bytes, std::span<std::byte> destination) const;

    /// Checks for changes since the file was opened, as the constructor was told. A deleted file passes: it
    /// keeps its data while its descriptor is open, or a mapping of it exists.
    /// @throws data_changed if there are any.
    void check_unchanged() const;
    /// The same, but does nothing if the file passed a check less than `max_age` before `now`.
    /// @throws as check_unchanged().
    void check_unchanged(std::chrono::nanoseconds max_age, std::chrono::steady_clock::time_point now) const;

 private:
    int open_first();
    int open_again() const;
    void check_identity(const file_identity& now) const;
    void check_now(std::int64_t now_ns) const;

    static constexpr std::int64_t never = std::numeric_limits<std::int64_t>::min();

    std::string path_;
    std::string absolute_path_;
    change_check check_;
    file_identity identity_;
    std::unique_ptr<detail::cached_descriptor> descriptor_;
    std::optional<descriptor_lease> kept_open_;             ///< unless the path is checked
    mutable std::atomic<std::int64_t> checked_ns_ = never;  // by the steady clock
};

}  // namespace pinflow
