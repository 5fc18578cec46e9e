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

/// Host memory to register in place: a shared read-only mapping of a file, shared memory, or the process's
/// own writable memory. Other mappings are refused. Registering page-locks whole pages in place; pinned
/// memory is allocated page-locked.
///
/// An array of less than 32 MiB in the process's own memory is refused if another array may begin in its last
/// page. With that page registered, CUDA (driver 580) would refuse copies of the other array ("invalid
/// argument"), because they begin in a registered page and end in an unregistered one. For the same reason
/// other code must not copy a range of which a part is registered, or is being registered.
struct pin_range {
    std::span<const std::byte> bytes;
    std::string description;  ///< for messages: "'x.npy'"
    /// Keeps the bytes mapped while they are registered. Without an owner, the bytes must outlive the object
    /// that registers them.
    std::shared_ptr<const void> owner;
};

/// The ranges of `source` that are in the address space, in order of its rows, kept alive by the source.
/// Consecutive extents are joined into one range if they overlap or no whole page lies between them, and if
/// both are in files or both are not. So thousands of small files that are mapped side by side are registered
/// in large pieces.
/// @throws invalid_argument for a null pointer.
std::vector<pin_range> pin_ranges(const std::shared_ptr<const row_source>& source);

/// Further limit on the pin budget, besides the memory that the machine and the cgroup have left.
enum class pin_limit : std::uint8_t {
    memory,   ///< no further limit
    memlock,  ///< RLIMIT_MEMLOCK, which CUDA's driver does not enforce for registered pages
};

struct pin_options {
    /// Budget for the memory that pinflow page-locks in this process, in bytes. Pages registered in place get
    /// the budget minus the pinned buffers that exist when registration begins, and never more than the
    /// machine and the cgroup have left. No pinned buffer is refused because of it. 0: three quarters of what
    /// the machine and the cgroup have left, from which pinned buffers are not subtracted.
    std::uint64_t budget_bytes = 0;
    /// `memlock` lowers the budget to RLIMIT_MEMLOCK, unless the process has CAP_IPC_LOCK.
    pin_limit limit = pin_limit::memory;
    /// False registers nothing unless all memory can be registered in place and fits the budget, and stops at
    /// the first piece that the driver refuses. True registers as many pieces as possible, so that a file 5 %
    /// over the budget has 95 % of its rows registered; it stops at the 16th piece that the driver refuses.
    bool allow_partial = true;
    /// Bytes registered by one call, rounded down to whole pages (at least one). Copies can use each piece as
    /// soon as it is registered, and the threads can be stopped between pieces. If `allow_partial` is true
    /// and `budget_bytes` is set to less than 16 pieces, pieces are smaller, down to 1 MiB.
    std::uint64_t piece_bytes = std::uint64_t{64} << 20;
    /// The address in one of the ranges at which registering begins; the bytes before it are registered last.
    /// Null: the front.
    const std::byte* begin_at = nullptr;
    /// Whether to register, at the end, the pieces that a reader had passed, or was close to, before they
    /// were registered (see pinned_pages::set_reader_position). False leaves them out.
    bool registers_rest = true;
    /// A piece that takes longer than this to read into memory, or to register, is given up, and so is
    /// everything not registered yet. The driver has been reported never to return from registering.
    std::chrono::nanoseconds piece_deadline = std::chrono::seconds(30);
};

struct pin_report {
    bool finished = false;  ///< nothing more will be registered
    bool complete = false;  ///< everything is registered
    /// A part could not be registered, or did not fit the budget; always true on the host device. Pieces that
    /// pin_options::registers_rest leaves out do not count.
    bool failed = false;
    std::uint64_t total_bytes = 0;
    std::uint64_t registered_bytes = 0;
    std::chrono::nanoseconds duration{};  ///< from construction until finished; 0 before that
    /// Empty until finished. "registered read-only, 3.1 GiB, 0.10 s" if complete; otherwise it says how much
    /// is registered, and why the rest is not: "registered read-only, 7.6 GiB of 8.0 GiB (95 %), 0.25 s: the
    /// pin budget of 7.6 GiB is used up (three quarters of the memory that is available)".
    std::string reason;
};

/// A run of consecutive bytes that are all registered, or all not registered. It may end at the end of a
/// range, although the next bytes have the same state. A run that begins outside the ranges is not
/// registered, and has all the bytes that were asked for, even if some of them are in a range.
struct pin_run {
    bool registered = false;
    std::uint64_t size_bytes = 0;
};

/// Registers host pages with a CUDA device in place, without copying them. The copy engine and kernels read
/// the mapped pages at the addresses that the host uses. This is checked for every piece: a device that maps
/// the pages at other addresses is refused. Once a page is registered, every CUDA device can read it.
///
/// From construction on, one thread registers piece by piece, while another thread reads the next pieces into
/// memory (with oneTBB's workers if the memory is writable). `covers` says at any time whether bytes can be
/// copied already. A failed registration throws nothing: `report` has the reason, and `require` throws it.
/// Pages that pinflow has already registered for another object are counted as registered, and not registered
/// again. Memory that other code has page-locked in one allocation or registration, such as a pinned tensor
/// of PyTorch, also counts as registered, but not the pages of a file. It must stay page-locked while this
/// object exists, which leaves it so. The first object for a CUDA device takes some device memory: see
/// pinned_buffer.
///
/// Copies must have finished before destruction. The destructor stops the threads (which takes about as long
/// as one piece), unregisters the pages, and then releases the owners. If the driver does not return within
/// pin_options::piece_deadline, the destructor returns anyway. The thread, the owners and the share of the
/// pin budget are then kept until the driver returns, if ever.
///
/// Move-only. A moved-from object has nothing registered: `wait`, `wait_for`, `require` and `report`
/// throw invalid_argument. Members may be called from several threads. After fork, the child can only destroy
/// the object, which has no effect on the registration.
class pinned_pages {
 public:
    /// Starts registering `ranges`. For the host device nothing is registered, and `report` says so.
    /// @throws invalid_argument if pin_options::piece_deadline is not above 0; device_error if the device
    /// cannot be used.
    pinned_pages(std::vector<pin_range> ranges, pinflow::device device, const pin_options& options = {});
    pinned_pages(pinned_pages&&) noexcept;
    pinned_pages& operator=(pinned_pages&&) noexcept;
    pinned_pages(const pinned_pages&) = delete;
    pinned_pages& operator=(const pinned_pages&) = delete;
    ~pinned_pages();

    /// Whether all `size_bytes` at `data` are registered by now. Never waits, takes no lock.
    bool covers(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    /// Whether all `size_bytes` at `data` are registered, or may still be. False if any of these bytes is
    /// not registered and will stay so: its page was refused, exceeds the budget or lies outside the ranges,
    /// or registration has ended. Never waits, takes no lock.
    bool may_cover(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    /// The run of bytes from `data` on, at most `size_bytes`, that have the same state as the first byte:
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
    /// Waits until nothing more will be registered.
    /// @return whether everything is registered.
    bool wait() const;
    /// Waits until all `size_bytes` at `data` are registered, until `may_cover` is false, or until `timeout`
    /// has passed.
    /// @return whether they are registered.
    bool wait_for(const std::byte* data, std::uint64_t size_bytes, std::chrono::nanoseconds timeout) const;
    /// Waits as `wait` does.
    /// @throws unsupported, with the reason, unless everything is registered.
    void require() const;
    pin_report report() const;

 private:
    std::unique_ptr<detail::pin_worker> worker_;
};

}  // namespace pinflow
