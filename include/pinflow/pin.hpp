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
    std::string description;  ///< for messages: "'x.npy'"
    /// What keeps the bytes mapped, for as long as they are registered. Without one they must outlive the
    /// object that registers them.
    std::shared_ptr<const void> owner;
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
    /// False registers nothing unless everything fits the budget, and stops at the first piece that is
    /// refused. True registers what it can, so that a file 5 % over the budget has 95 % of its rows pinned.
    bool allow_partial = true;
    /// Bytes registered by one call. After each piece, copies can use it, and stopping is possible. A
    /// `budget_bytes` below 16 pieces has smaller ones, down to 1 MiB.
    std::uint64_t piece_bytes = std::uint64_t{64} << 20;
    /// Where registering begins, in one of the ranges: what lies before comes last. Null: at the front.
    const std::byte* begin_at = nullptr;
    /// Whether to register, at the end, the pieces that a reader had passed before they were registered (see
    /// pinned_pages::set_reader_position). False leaves them out.
    bool registers_rest = true;
    /// A piece that takes longer than this to read into memory, or to register, is given up, and so is
    /// everything not registered yet. The driver has been reported never to return from registering.
    std::chrono::nanoseconds piece_deadline = std::chrono::seconds(30);
};

struct pin_report {
    bool finished = false;  ///< nothing more will be registered
    bool complete = false;  ///< everything is registered
    bool failed = false;    ///< something that was to be registered is not
    std::uint64_t total_bytes = 0;
    std::uint64_t registered_bytes = 0;
    std::chrono::nanoseconds duration{};
    /// Empty until finished. "registered read-only, 3.1 GiB, 0.10 s" if complete; otherwise how much is
    /// registered, and why not the rest: "registered read-only, 7.6 GiB of 8.0 GiB (95 %), 0.25 s: the pin
    /// budget of 7.6 GiB has no room for more (three quarters of the memory that is available)".
    std::string reason;
};

/// A run of consecutive bytes that are all registered, or all not registered.
struct pin_run {
    bool registered = false;
    std::uint64_t size_bytes = 0;
};

/// Host pages registered with a CUDA device in place: the copy engine, and kernels, read the mapped pages
/// themselves, at the addresses that the host uses (checked for every piece: a device on which they differ is
/// refused). Nothing is copied. The pages of all CUDA devices are shared: registered once, every device can
/// read them.
///
/// Registration runs piece by piece on a thread of its own from construction on, while another thread brings
/// the next pieces into memory; `covers` says at any time what can be copied already. What cannot be
/// registered is no error but a reason: `report`, or `require` if it has to work. Pages registered by pinflow
/// before, by another object, are counted and not registered twice.
///
/// Order of destruction: copies must have finished; the destructor stops the threads, which takes about a
/// piece, unregisters, and only then lets go of the owners. If the driver does not return within
/// pin_options::piece_deadline, the destructor returns nevertheless. The thread, the owners and the pin
/// budget are then left alone until the driver returns, if ever.
///
/// Move-only. A moved-from object has nothing registered: `wait`, `wait_for`, `require` and `report`
/// throw invalid_argument. Members may be called from several threads. After fork, the child can only destroy
/// it, which leaves everything as it is.
class pinned_pages {
 public:
    /// Starts registering `ranges`. A host device registers nothing, and says so.
    /// @throws invalid_argument if pin_options::piece_deadline is not above 0, or if the pin limit is out of
    /// range.
    pinned_pages(std::vector<pin_range> ranges, pinflow::device device, const pin_options& options = {});
    pinned_pages(pinned_pages&&) noexcept;
    pinned_pages& operator=(pinned_pages&&) noexcept;
    pinned_pages(const pinned_pages&) = delete;
    pinned_pages& operator=(const pinned_pages&) = delete;
    ~pinned_pages();

    /// Whether all `size_bytes` at `data` are registered by now. Never waits, takes no lock.
    bool covers(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    /// The run of bytes from `data` on, at most `size_bytes`, that are in the same state as the first one:
    /// registered by now, or not. Never waits, takes no lock.
    pin_run run_at(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    /// Bytes registered without a gap from the first range's first byte on, in the ranges' order. Never
    /// waits.
    std::uint64_t registered_prefix_bytes() const noexcept;
    /// Reports the position of a reader that reads the ranges from the front and does not wait for
    /// registration. From then on pieces are registered ahead of `data`. Pieces that it has passed are
    /// registered last, or not at all if `registers_rest` is false.
    /// Never waits. Call it for every batch.
    void set_reader_position(const std::byte* data) noexcept;
    /// Whether nothing more will be registered, for example after a missed deadline. Takes no lock.
    bool finished() const noexcept;
    /// Whether everything is registered: pin_report::complete, without a lock.
    bool all_registered() const noexcept;
    /// Waits until nothing more will be registered. @return whether everything is.
    bool wait() const;
    /// Waits until all `size_bytes` at `data` are registered, nothing more will be, or the time is over.
    /// @return whether they are registered.
    bool wait_for(const std::byte* data, std::uint64_t size_bytes, std::chrono::nanoseconds timeout) const;
    /// Waits as `wait`. @throws unsupported, with the reason, unless everything is registered.
    void require() const;
    pin_report report() const;

 private:
    std::unique_ptr<detail::pin_worker> worker_;
};

}  // namespace pinflow
