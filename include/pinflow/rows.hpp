#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "pinflow/device.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/empty_on_move.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/stream.hpp"

namespace pinflow {

namespace detail {
class exchange_state;
}

/// How rows travel between a table in host memory and a device.
enum class row_route {
    automatic,  ///< the planner chooses, from what it measures once
    direct,     ///< the device reads and writes the rows where they lie: they must be page-locked
    /// The copy engine, row by row; with indices in host memory. On CUDA rows of files go direct: CUDA copies
    /// what is short with the CPU, which must not touch a truncated file.
    copy,
    staged,  ///< the CPU gathers rows into page-locked memory, or places them from there; the copy engine
             ///< carries that
    hybrid,  ///< direct and staged, each for a part of the rows, at the same time
};

/// "auto", "direct", "copy", "staged", "hybrid".
std::string_view to_string(row_route route) noexcept;

/// What a scatter does with an index that it is given more than once.
enum class duplicate_policy {
    last,   ///< the row given last, in the order of the indices, is written
    sum,    ///< the rows' sum is written, added up in the order of the indices (small floats: as float)
    error,  ///< nothing is written
};

namespace detail {
/// 64-bit numbers one after the other in host memory, which stays when the range itself goes.
template <typename Range>
concept row_number_range =
    std::ranges::contiguous_range<Range> && std::ranges::sized_range<Range> &&
    std::ranges::borrowed_range<Range> &&
    (std::convertible_to<std::add_pointer_t<std::ranges::range_reference_t<Range>>, const std::uint64_t*> ||
     std::convertible_to<std::add_pointer_t<std::ranges::range_reference_t<Range>>, const std::int64_t*>);
}  // namespace detail

/// Row numbers: 64 bits each, in host memory or in the memory of the device that rows are exchanged with.
/// Signed numbers are reinterpreted as unsigned, so a negative one is outside every table. Borrows the
/// numbers, as a span does: their memory must outlive the row_ids.
class row_ids {
 public:
    /// Takes a contiguous range of std::uint64_t or std::int64_t in host memory: a vector, an array, a span
    /// or the like. If these types are `long`, a range of `long long` is refused. A temporary vector is
    /// refused too, since it would be destroyed before its numbers are read.
    template <typename Range>
        requires(!std::same_as<std::remove_cvref_t<Range>, row_ids> && detail::row_number_range<Range>)
    row_ids(Range&& ids) noexcept
        : data_(reinterpret_cast<const std::uint64_t*>(std::ranges::data(ids))),
          count_(std::ranges::size(ids)) {}
    /// `count` row numbers in device memory.
    static row_ids on_device(const void* data, std::uint64_t count) noexcept {
        row_ids ids(std::span(static_cast<const std::uint64_t*>(data), count));
        ids.on_device_ = true;
        return ids;
    }

    const std::uint64_t* data() const noexcept { return data_; }
    std::uint64_t size() const noexcept { return count_; }
    bool on_device() const noexcept { return on_device_; }

 private:
    const std::uint64_t* data_;
    std::uint64_t count_;
    bool on_device_ = false;
};

/// Rows of one size, one after the other in host memory. A moved-from table has no rows.
class row_table {
 public:
    /// The rows of a mapped file, or of an array in memory, for gathering. @throws invalid_argument for
    /// a null pointer, and for an inconsistent source (its sizes, row counts or extents disagree);
    /// unsupported if it is not mapped in one piece.
    explicit row_table(std::shared_ptr<const row_source> source);
    /// `rows`, which may be written: the process's own memory, preferably a pinned_buffer. `element` is the
    /// element type of a row; only duplicate_policy::sum needs it. `owner` keeps the memory alive. Without an
    /// owner, the memory must outlive everything that the table is given to.
    /// @throws invalid_argument unless `rows` is a whole number of rows, and a row of elements.
    row_table(std::span<std::byte> rows, std::uint64_t row_size_bytes,
              pinflow::dtype element = dtype::of<std::byte>(), std::shared_ptr<const void> owner = nullptr);

    const std::byte* data() const noexcept { return data_; }
    std::uint64_t row_count() const noexcept { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept { return row_size_bytes_; }
    std::uint64_t size_bytes() const noexcept { return row_count_ * row_size_bytes_; }
    const pinflow::dtype& element() const noexcept { return element_; }
    bool writable() const noexcept { return writable_; }
    /// For messages: a path, or "a table in memory".
    const std::string& description() const noexcept { return description_; }
    /// Of a mapped file or an array; otherwise null.
    const std::shared_ptr<const row_source>& source() const noexcept { return source_; }
    /// What keeps the memory; null when nothing does.
    const std::shared_ptr<const void>& owner() const noexcept { return owner_; }

 private:
    detail::empty_on_move<std::byte*> data_;
    detail::empty_on_move<std::uint64_t> row_count_;
    detail::empty_on_move<std::uint64_t> row_size_bytes_;
    pinflow::dtype element_;
    detail::empty_on_move<bool> writable_;
    std::string description_;
    std::shared_ptr<const row_source> source_;
    std::shared_ptr<const void> owner_;
};

struct row_exchange_options {
    row_route route = row_route::automatic;
    /// Threads that gather and place rows on the staged route; 0: as many as the process may use.
    unsigned threads = 0;
    /// Upper bound on the page-locked memory of the staged route, which takes as much device memory again.
    /// If an eighth of the host memory that is left is less, that is the bound. The memory is taken on first
    /// use, and again for each further stream whose calls are in flight at the same time.
    std::uint64_t staging_bytes = std::uint64_t{64} << 20;
    /// Upper bound on what pinflow page-locks in this process, as pin_options::budget_bytes; 0: its default.
    std::uint64_t pin_budget_bytes = 0;
    /// As pin_options::limit.
    pinflow::pin_limit pin_limit = pinflow::pin_limit::memory;
    /// Thread blocks that move rows on the direct and hybrid routes, on CUDA. 0 lets the planner choose.
    /// Scatter blocks have 256 threads; gather blocks have 1024, or 512 if an address or size is not a
    /// multiple of 16 bytes. If the GPU has thread block clusters, an even number of 1024-thread blocks is
    /// launched in clusters of two. Such a launch waits until another kernel has freed two neighbouring SMs.
    /// An odd number is launched without clusters and does not wait for that.
    unsigned blocks = 0;
    /// The part of the rows that the hybrid route moves by the staged one, below 1; 0: the planner's, which
    /// is 0.4 when the hybrid route is asked for, as nothing is measured then.
    double staged_share = 0;
};

/// One batch of a group: its indices, and where its rows go to or come from in device memory.
struct row_gather {
    row_ids ids;
    std::byte* destination;  ///< ids.size() rows, one after the other
};
struct row_scatter {
    row_ids ids;
    const std::byte* source;
};

/// What moves the rows of a call, and why.
struct row_plan {
    row_route route = row_route::automatic;
    bool sorted = false;  ///< rows are taken in the order of their addresses, equal ones once
    /// Thread blocks of the direct part; 0: as many as there is work for. Sums, and batches that are not at
    /// multiples of 16 bytes, take more where the options set none.
    unsigned blocks = 0;
    double staged_share = 0;  ///< of the rows, on the hybrid route
    unsigned batches = 1;     ///< how many to group: the fewest within 3 % of the best rate
    /// GB/s (1e9 bytes). Measured for gathers; estimated from measured gathers for scatters. 0 if nothing was
    /// measured.
    double gbps = 0;
    std::string reason;  ///< one sentence; says what the options set
};

/// Moves rows between a table in host memory and a device, by their numbers: `gather` to the device,
/// `scatter` back.
///
/// Indices are checked before any row is touched. Indices in host memory are read and checked before the
/// call returns. Indices in device memory are checked when the stream reaches the call: if any is wrong,
/// the call moves nothing, and `check`, or the next call, throws.
///
/// Asynchronous calls only enqueue: on the given stream, and on streams of the exchange that are ordered with
/// it in both directions. The table, destinations, sources and indices in device memory must stay valid until
/// the stream has passed the call. Indices in host memory and lists of batches can be reused when the call
/// returns, and the stream may be destroyed then. Exchanges and streams are not synchronised with each other:
/// the caller must not let two of them write the same memory at the same time.
///
/// CUDA queues a few hundred operations per stream. If a stream is blocked and its queue is full, a call
/// blocks until the stream continues. The staged route enqueues some seven operations for each piece of rows
/// (8 MiB, less if staging_bytes is small).
///
/// The constructor page-locks a table that is not page-locked yet (read-only if it is a mapped file), unless
/// the route is `staged`. If that fails, only the staged route remains, and row_plan::reason says why. Pages
/// that pinflow has already registered for another object stay registered while the exchange exists. Memory
/// page-locked by others (a pinned_buffer, cudaHostRegister) must stay page-locked as long.
///
/// The first call for a row size and count measures for some tenths of a second, once in a process. It takes
/// device memory for up to 512 MiB of rows.
///
/// Truncated files: on the host device, the routes direct, copy and hybrid access the mapped pages if they
/// are set explicitly, and then raise SIGBUS. Otherwise rows are read with pread. On CUDA, the CPU's part of
/// the routes staged and hybrid is read with pread too, or copied under the fault guard if it is installed.
/// Kernels read registered pages, which a truncation does not take away.
///
/// Beside what is said with them, calls throw what `check` throws, invalid_argument for null pointers unless
/// there are no indices, and device_error. Members may be called from several threads; calls are enqueued one
/// at a time. The destructor waits until the streams have passed the calls. Calls on one that was moved from
/// throw invalid_argument, and its table is empty.
class row_exchange {
 public:
    /// The first one of a CUDA device loads kernels, for which CUDA may wait for all of the device's streams.
    /// @throws unsupported when the route asked for cannot work: the message says why.
    row_exchange(row_table table, pinflow::device device, const row_exchange_options& options = {});
    row_exchange(row_exchange&&) noexcept;
    row_exchange& operator=(row_exchange&&) noexcept;
    row_exchange(const row_exchange&) = delete;
    row_exchange& operator=(const row_exchange&) = delete;
    ~row_exchange();

    /// Row ids[i] of the table becomes row i of `destination`, in device memory of ids.size() rows, any
    /// alignment, that do not overlap the indices. Has finished when it returns. @throws invalid_argument for
    /// indices outside the table: how many, and the first; and for a destination that overlaps the table;
    /// unsupported for indices in device memory on the route copy.
    void gather(row_ids ids, std::byte* destination);
    /// The same in `stream`'s order: `destination` is written when the stream comes to the call, and whole
    /// when it has passed it.
    void gather_async(row_ids ids, std::byte* destination, stream_view stream);
    /// Gathers several batches as one group, which is faster for small rows of large tables. If the plan
    /// sorts rows, a row that several batches want crosses the link once. Batches are moved 64 at a time. A
    /// wrong index in device memory stops only its 64 batches, and its position is counted within them.
    void gather_group_async(std::span<const row_gather> batches, stream_view stream);

    /// Row i of `source`, in device memory, becomes row ids[i] of the table.
    /// @throws invalid_argument for indices outside the table, for a repeated index if `policy` is `error`,
    /// and for a source that overlaps the table.
    /// @throws unsupported if the table is read-only, or if the route is `copy` and `policy` is not `last`.
    /// Also if `policy` is `sum`, unless the elements are little-endian float16, bfloat16, float32, float64
    /// or 32- or 64-bit integers, and the rows and `source` are aligned to them.
    void scatter(row_ids ids, const std::byte* source, duplicate_policy policy = duplicate_policy::last);
    /// The same in `stream`'s order: `source` is read when the stream reaches the call, and the table is
    /// complete when the stream has passed it.
    void scatter_async(row_ids ids, const std::byte* source, duplicate_policy policy, stream_view stream);
    /// Scatters all batches, in their order, as one scatter. @throws as `scatter`, and unsupported for more
    /// than 64 batches unless `policy` is `last`.
    void scatter_group_async(std::span<const row_scatter> batches, duplicate_policy policy,
                             stream_view stream);

    /// Throws the errors of asynchronous calls that have finished. Does not wait for other calls.
    /// Every gather and scatter does this first.
    /// @throws what was wrong with the indices of such a call, or with reading its rows: the oldest call
    /// first, each call once.
    /// @throws data_changed if the table's file has changed.
    void check();

    /// The plan for `batches` batches of `batch_rows` rows moved as one group, with indices in host memory.
    /// row_plan::batches says how many are worth grouping. Calls with indices in device memory are measured
    /// separately and may get another plan.
    /// If nothing is measured yet, this measures for about a second and reads rows of the table.
    row_plan plan_gather(std::uint64_t batch_rows, unsigned batches = 1);
    row_plan plan_scatter(std::uint64_t batch_rows, unsigned batches = 1);

    const row_table& table() const noexcept;
    const pinflow::device& device() const noexcept;

 private:
    std::unique_ptr<detail::exchange_state> state_;
};

}  // namespace pinflow
