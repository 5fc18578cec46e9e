#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/hdf5_access.hpp"
#include "pinflow/error.hpp"
#include "src/cli/hdf5_protocol.hpp"

/// The tool reads HDF5 files with libhdf5 in a child process, because damaged files can crash libhdf5 or make
/// it loop for ever. The child runs the tool's own program, under limits of memory and time. It is spawned,
/// not only forked, because the tool has threads and may use CUDA. If the child fails, the tool prints one
/// error line.
namespace pinflow::cli {

/// The first argument of the child, and the descriptor of the socket that it listens to.
inline constexpr std::string_view hdf5_child_command = "hdf5-child";
inline constexpr int hdf5_child_socket = 3;

/// CPU time limit of one request to libhdf5. Locating 2^24 chunks, or listing a million datasets, takes about
/// 25 s.
inline constexpr std::chrono::seconds max_hdf5_cpu_time{60};
/// The time limit of a whole answer; a disk may be slow.
inline constexpr std::chrono::seconds max_hdf5_waiting{300};
/// Upper bound on the child's address space; less if memory is short. HDF5 chunks can be 4 GiB.
inline constexpr std::uint64_t max_hdf5_memory_bytes = std::uint64_t{8} << 30;
/// The size limit of the rows in one answer, unless a single row is larger.
inline constexpr std::uint64_t max_hdf5_rows_bytes = std::uint64_t{8} << 20;

struct hdf5_child_options {
    std::string program = "/proc/self/exe";
    std::vector<std::string> arguments{"pinflow", std::string(hdf5_child_command)};  ///< argv
    std::chrono::milliseconds max_waiting = max_hdf5_waiting;
};

/// The child died, missed its deadline, ran out of memory or sent a malformed answer, and has been ended. The
/// message continues "cannot open 'a.h5': ".
class hdf5_child_lost : public error {
 public:
    using error::error;
};

/// One child process, from its start to its end. For one thread at a time.
class hdf5_child {
 public:
    /// Starts the process.
    /// @throws system_failure; like that of hdf5_child_lost, its message continues "cannot open 'a.h5': ".
    explicit hdf5_child(hdf5_child_options options = {});
    hdf5_child(const hdf5_child&) = delete;
    hdf5_child& operator=(const hdf5_child&) = delete;
    /// Kills the process.
    ~hdf5_child();

    /// The process; -1 after this object has killed it or found that it had ended.
    ::pid_t process() const noexcept { return process_; }

    /// Sends a request (list, describe or open) and waits for the answer.
    /// @throws hdf5_child_lost, also if it was lost before; the error that the child reports; system_failure
    /// if the answer takes more memory than there is.
    std::vector<std::byte> ask(const hdf5_request& request);
    /// Sends a request to read rows, which must fill `destination`. @throws like the other overload.
    void ask(const hdf5_request& request, std::span<std::byte> destination);

    /// Ends the process, because it cannot be trusted any more. @throws hdf5_child_lost.
    [[noreturn]] void refuse_answer();

 private:
    template <typename Take>
    void exchange(const hdf5_request& request, std::uint64_t max_bytes, Take take);
    void check(delivery result);
    [[noreturn]] void lose(std::string sentence);
    int end() noexcept;

    hdf5_child_options options_;
    int socket_ = -1;
    ::pid_t process_ = -1;
    std::string lost_reason_ = "the process that reads it with libhdf5 was ended";
};

/// Calls libhdf5 in child processes, from any thread. One child serves all lists and descriptions. It is
/// started at the first request, and again after it was lost or found a file damaged. Each dataset that only
/// libhdf5 can read has its own child while it is open.
class hdf5_in_child final : public detail::hdf5_access {
 public:
    explicit hdf5_in_child(hdf5_child_options options = {});

    std::vector<array_listing> list(const input_file& file) override;
    detail::hdf5_description describe(const input_file& file, std::string_view name) override;
    detail::hdf5_read_function reader(std::shared_ptr<const input_file> file,
                                      const detail::hdf5_description& description) override;

 private:
    template <typename Parse>
    auto ask(const hdf5_request& request, Parse parse);

    hdf5_child_options options_;
    std::mutex mutex_;
    std::unique_ptr<hdf5_child> child_;  // guarded by mutex_
};

/// From now on, libhdf5 lists, describes and reads datasets in child processes. Writing still calls libhdf5
/// in this process. Starts no child yet. Does nothing in a build without HDF5.
void use_hdf5_child();

/// Serves the tool that started this process, until the tool ends it or exits. Returns at once if this
/// process is not such a child.
void serve_as_hdf5_child();

}  // namespace pinflow::cli
