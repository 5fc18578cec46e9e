#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pinflow/device.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow {

namespace detail {
class pin_worker;
}

/// Host memory to register where it lies: a shared mapping of a file, or memory of the process's own.
struct pin_range {
    std::span<const std::byte> bytes;
    std::string description;            ///< for messages: "'x.npy'"
    std::shared_ptr<const void> owner;  ///< what keeps the bytes mapped
};

/// The ranges of `source` that are in the address space, in order of its rows, kept alive by the source.
/// Extents that follow each other without a page between them are one range, so that thousands of small files
/// that are mapped side by side are registered in large pieces.
std::vector<pin_range> pin_ranges(const std::shared_ptr<const row_source>& source);

/// What bounds the pin budget beside the memory that the machine and the cgroup have left.
enum class pin_limit : std::uint8_t {
    memory,   ///< nothing else
    memlock,  ///< RLIMIT_MEMLOCK, which CUDA's driver does not enforce for registered pages
};

struct pin_options {
    /// Upper bound on what pinflow registers in this process, in bytes; never more than the machine and the
    /// cgroup have left. 0: three quarters of that.
    std::uint64_t budget_bytes = 0;
    /// `memlock` lowers the budget to RLIMIT_MEMLOCK, unless the process has CAP_IPC_LOCK.
    pin_limit limit = pin_limit::memory;
    /// Bytes registered at a time. After each piece, copies can use it, and stopping is possible.
    std::uint64_t piece_bytes = std::uint64_t{64} << 20;
    /// For a reader who goes through the ranges from the front meanwhile, and takes what is not registered
    /// yet by another way: every second piece is registered first, from the front, then the others, from the
    /// back, so that the reader does not run ahead of it all the time. False: from the front.
    bool alongside_reader = false;
};

struct pin_report {
    bool finished = false;  ///< nothing more will be registered
    bool complete = false;  ///< everything is registered
    std::uint64_t total_bytes = 0;
    std::uint64_t registered_bytes = 0;
    std::chrono::nanoseconds duration{};
    /// "registered read-only, 3.1 GiB, 0.10 s", or one sentence that says why not; empty until finished.
    std::string reason;
};

/// Bytes that are alike: registered, or not.
struct pin_stretch {
    bool registered = false;
    std::uint64_t size_bytes = 0;
};

/// Host pages registered with a CUDA device in place: the copy engine, and kernels, read the mapped pages
/// themselves, at the addresses that the host uses (checked for every piece: a device on which they differ is
/// refused). Nothing is copied. The pages of all CUDA devices are shared: registered once, every device can
/// read them.
///
/// Registration runs piece by piece on a thread of its own from construction on, while another brings the
/// next piece into memory; `covers` says at any time what can be copied already. What cannot be registered is
/// no error but a reason: `report`, or `require` where it has to work. Pages registered by pinflow before, by
/// another object, are counted and not registered twice.
///
/// The order of the end: copies must have finished; the destructor stops the thread (within two pieces),
/// unregisters, and only then lets go of the owners. Move-only; members may be called from several threads.
class pinned_pages {
 public:
    /// Starts registering `ranges`. A host device registers nothing, and says so.
    pinned_pages(std::vector<pin_range> ranges, pinflow::device device, const pin_options& options = {});
    pinned_pages(pinned_pages&&) noexcept;
    pinned_pages& operator=(pinned_pages&&) noexcept;
    pinned_pages(const pinned_pages&) = delete;
    pinned_pages& operator=(const pinned_pages&) = delete;
    ~pinned_pages();

    /// Whether all `size_bytes` at `data` are registered by now. Never waits, takes no lock.
    bool covers(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    /// Whether the byte at `data` is registered by now, and how many of the `size_bytes` from it on are as it
    /// is. Never waits, takes no lock.
    pin_stretch stretch_at(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    /// Bytes registered without a gap from the first range's first byte on, in the ranges' order. Never
    /// waits.
    std::uint64_t registered_prefix_bytes() const noexcept;
    /// Whether nothing more will be registered. Never waits.
    bool finished() const noexcept;
    /// Waits until then. @return whether everything is registered.
    bool wait() const;
    /// The same. @throws unsupported, with the reason, unless everything is registered.
    void require() const;
    pin_report report() const;

 private:
    std::unique_ptr<detail::pin_worker> worker_;
};

}  // namespace pinflow
