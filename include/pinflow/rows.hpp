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
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/empty_on_move.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/stream.hpp"

namespace pinflow {

namespace detail {
class calls_in_flight;
class exchange_state;
class pending_call;
}  // namespace detail

/// How rows are copied between a table in host memory and a device.
enum class row_route {
    automatic,  ///< by fixed rules (see row_exchange), or the route that `tune` found fastest
    /// The device reads and writes the rows in place. For a GPU they must be page-locked. On the host device,
    /// the CPU copies rows of files under the fault guard, or reads them with pread.
    direct,
    /// The copy engine copies row by row; indices must be in host memory. Rows of files take the route
    /// `direct` instead (on a GPU, because CUDA copies short rows with the CPU, which must not touch a
    /// truncated file).
    copy,
    staged,  ///< the CPU gathers rows into page-locked staging memory, or scatters them from there; the copy
             ///< engine moves the staging memory
    /// Direct and staged at the same time, each for a part of the rows. On the host device, rows of files
    /// take the route `direct` instead.
    hybrid,
};

/// "auto", "direct", "copy", "staged", "hybrid".
std::string_view to_string(row_route route) noexcept;

/// What a scatter does with a repeated index.
enum class duplicate_policy {
    last,  ///< the last row with that index is written, in the order of the indices
    /// The row of the table is replaced by the sum of the rows with that index; its old value is not added.
    /// Rows are added in the order of the call. float16 and bfloat16 are added as float32 and rounded once.
    sum,
    error,  ///< the call fails, and writes nothing
};

namespace detail {
/// A contiguous range of 64-bit numbers in host memory that stays valid after the range object is destroyed.
template <typename Range>
concept row_number_range =
    std::ranges::contiguous_range<Range> && std::ranges::sized_range<Range> &&
    std::ranges::borrowed_range<Range> &&
    (std::convertible_to<std::add_pointer_t<std::ranges::range_reference_t<Range>>, const std::uint64_t*> ||
     std::convertible_to<std::add_pointer_t<std::ranges::range_reference_t<Range>>, const std::int64_t*>);
}  // namespace detail

/// Indices of rows: 64 bits each, in host memory or in the memory of the device that rows are exchanged with.
/// Signed indices are reinterpreted as unsigned, so a negative index is outside every table. Borrows the
/// indices, as a span does: their memory must outlive the row_ids.
class row_ids {
 public:
    /// Takes a contiguous range of std::uint64_t or std::int64_t in host memory: a vector, an array, a span
    /// or the like. If these types are `long`, a range of `long long` is refused. A temporary vector is
    /// refused too, since it would be destroyed before its indices are read.
    template <typename Range>
        requires(!std::same_as<std::remove_cvref_t<Range>, row_ids> && detail::row_number_range<Range>)
    row_ids(Range&& ids) noexcept
        : data_(reinterpret_cast<const std::uint64_t*>(std::ranges::data(ids))),
          count_(std::ranges::size(ids)) {}
    /// `count` indices in device memory, aligned to 8 bytes.
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

/// Contiguous rows of one size in host memory. A moved-from table has no rows.
class row_table {
 public:
    /// The rows of a mapped file, or of an array in memory, for gathering.
    /// @throws invalid_argument for a null pointer, and for an inconsistent source (its sizes, row counts or
    /// extents disagree, or its type is not little-endian).
    /// @throws unsupported unless all rows are one extent of contiguous rows in the address space, or have no
    /// bytes.
    explicit row_table(std::shared_ptr<const row_source> source);
    /// A writable table: `rows` is the process's own memory, preferably a pinned_buffer. `element` is the
    /// element type of a row; only duplicate_policy::sum needs it. `owner` keeps the memory alive. Without an
    /// owner, the memory must outlive the table, its copies and every row_exchange of them.
    /// @throws invalid_argument unless `rows` is a whole number of rows, and a row a whole number of
    /// elements.
    /// @throws invalid_argument for a null pointer, unless `rows` is empty.
    row_table(std::span<std::byte> rows, std::uint64_t row_size_bytes,
              pinflow::dtype element = dtype::of<std::byte>(), std::shared_ptr<const void> owner = nullptr);

    const std::byte* data() const noexcept { return data_; }
    std::uint64_t row_count() const noexcept { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept { return row_size_bytes_; }
    std::uint64_t size_bytes() const noexcept { return row_count_ * row_size_bytes_; }
    const pinflow::dtype& element() const noexcept { return element_; }
    bool writable() const noexcept { return writable_; }
    /// For messages: as row_source::description, or "a table in memory".
    const std::string& description() const noexcept { return description_; }
    /// The source that the table was made from; null for memory given as `rows`.
    const std::shared_ptr<const row_source>& source() const noexcept { return source_; }
    /// The owner of the memory; null if there is none.
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
    /// Threads that gather and scatter rows on the staged and hybrid routes, and that gather rows of files on
    /// the host device, as loader_options::threads.
    unsigned threads = 0;
    /// The maximum number of rows of a call: of one batch, or of all batches of a group that travel together;
    /// 1 to 2^32 - 1. Memory for calls of this size is reserved when the exchange is made: 8 bytes of
    /// page-locked memory for each row and each call in flight (32 MiB by default), and on a GPU, for up to 8
    /// calls, device memory of some 33 bytes a row (36 above 262,144 rows; some 34 MB by default). If 8 calls
    /// take more than 64 MiB of device memory, fewer have it, but at least 2. A larger asynchronous call
    /// throws invalid_argument; a larger synchronous call, of up to 2^32 - 1 rows, allocates its memory.
    std::uint64_t max_batch_rows = std::uint64_t{1} << 17;
    /// The maximum number of calls in flight, that is, calls that their stream has not passed yet; 1 to 4096.
    /// A call blocks until there is room for it. A stream may have in flight at most half (rounded up) of the
    /// calls that other streams leave, so that one stalled stream does not block all others. With the default
    /// of 32, six stalled streams together can take all of them. The maximum is lowered, but not below 2, if
    /// the page-locked memory of the calls would be more than an eighth of the host memory that is left.
    unsigned max_calls_in_flight = 32;
    /// Page-locked memory of the staging buffers of one stream, in bytes. If it exceeds an eighth of the host
    /// memory that is left, that eighth is used. It is divided into 2 to 16 buffers of up to 8 MiB each, so
    /// at most 128 MiB are used. A buffer holds at least one row: rows longer than 8 MiB make the buffers
    /// larger, and a row longer than `staging_bytes / 2` makes them take more in total. The buffers take the
    /// same amount of device memory. If calls may take the staged or hybrid route, the exchange reserves
    /// buffers for two streams: up to a quarter of the host memory that is left, or half on the host device.
    /// A call on a third stream blocks until the calls on one of the two have ended. All synchronous calls
    /// use one stream.
    std::uint64_t staging_bytes = std::uint64_t{64} << 20;
    /// Budget for the memory that pinflow page-locks in this process, as pin_options::budget_bytes. The
    /// page-locked memory of calls (see `max_batch_rows`) is allocated before the table is registered, so it
    /// is subtracted from a budget that is set. Staging buffers are allocated afterwards. 0: the default.
    std::uint64_t pin_budget_bytes = 0;
    /// As pin_options::limit.
    pinflow::pin_limit pin_limit = pinflow::pin_limit::memory;
    /// Thread blocks that copy rows on the direct and hybrid routes, on CUDA. 0 lets the planner choose.
    /// Scatter blocks have 256 threads; gather blocks have 896, or 512 if an address or size is not a
    /// multiple of 16 bytes. If the GPU has thread block clusters, an even number of 896-thread blocks is
    /// launched in clusters of two. Such a launch waits while no two neighbouring SMs are free.
    /// A launch of an odd number of blocks is without clusters and needs no such pair.
    unsigned blocks = 0;
    /// The share of the rows, below 1, that the hybrid route stages. 0 lets the planner choose: 0.4, unless
    /// `tune` found a better one.
    double staged_share = 0;
    /// Where calls and staging buffers get device memory. Null: from the device's stream-ordered pool.
    std::shared_ptr<memory_resource> device_memory = nullptr;
};

/// One batch of a group: its indices, and the device memory that its rows are copied to or from.
struct row_gather {
    row_ids ids;
    std::byte* destination;  ///< ids.size() contiguous rows
};
struct row_scatter {
    row_ids ids;
    const std::byte* source;
};

/// The route of a call's rows, and the reason for it.
struct row_plan {
    row_route route = row_route::automatic;
    /// Rows are read or written in the order of their addresses, repeated ones once. False for direct
    /// scatters on the host device: they are sorted only if the call's policy is not duplicate_policy::last.
    bool sorted = false;
    /// Thread blocks of the direct part; 0 on the routes copy and staged. If the options set no number, sums
    /// and batches that are not aligned to 16 bytes may use more.
    unsigned blocks = 0;
    double staged_share = 0;  ///< the share of the rows that the hybrid route stages; 0 on other routes
    /// How many batches to group: the smallest number within 3 % of the best rate that `tune` found; 1
    /// without it.
    unsigned batches = 1;
    /// GB/s (1e9 bytes) that `tune` found: measured for gathers, estimated from gathers for scatters. 0
    /// without it.
    double gbps = 0;
    std::string reason;  ///< one sentence; names the values that the options set
};

/// A handle of an asynchronous call of a row_exchange, to get its error. Copyable; may outlive the exchange.
/// A default-constructed handle belongs to no call. Thread-safe.
class exchange_call {
 public:
    exchange_call() noexcept = default;
    /// Throws the error of the call, if its stream has passed it. Does not wait. Each error is thrown once,
    /// by the first `check` of any copy or of the exchange.
    /// @throws invalid_argument for wrong indices in device memory, and for repeated indices that
    /// duplicate_policy::error refuses.
    /// @throws the error in reading or writing the rows.
    void check() const;

 private:
    friend class row_exchange;
    exchange_call(std::shared_ptr<detail::calls_in_flight> calls,
                  std::vector<std::shared_ptr<detail::pending_call>> pending);

    std::shared_ptr<detail::calls_in_flight> calls_;
    std::vector<std::shared_ptr<detail::pending_call>> pending_;
};

/// Copies rows between a table in host memory and a device by index: `gather` to the device, `scatter` back.
///
/// Indices are checked before any row is touched. Indices in host memory are read and checked before the
/// call returns. Indices in device memory are checked when the stream reaches the call: if any is out of
/// range, the call copies nothing, and its handle or `check` throws. Other calls do not throw this error. For
/// rows of 0 bytes, indices in device memory are not checked.
///
/// Asynchronous calls only enqueue, on the given stream and on streams of the exchange. Rows are copied after
/// the stream's earlier work and before its later work. The table, destinations, sources and indices in
/// device memory must stay valid until the stream has passed the call. When the call returns, indices in host
/// memory and lists of batches can be reused, and the stream may be destroyed. Exchanges and streams are not
/// synchronised with each other: the caller must make sure that no two of them write the same memory at the
/// same time, and that none reads what another one writes.
///
/// Page-locked memory, staging buffers and device memory of calls are reserved by the constructor and by
/// `tune`. Apart from that, asynchronous calls allocate heap memory (small objects; on the route `copy` also
/// lists of 100 to 150 bytes a row). On the host device most calls allocate device memory, too; on a GPU a
/// call does only if all calls with reserved memory are in flight (row_exchange_options::max_batch_rows). It
/// comes from row_exchange_options::device_memory or, if that is null, from the device's stream-ordered pool.
///
/// CUDA queues a few hundred operations per stream. If a stream is blocked and its queue is full, or if it
/// uses its share of max_calls_in_flight, a call on it blocks until the stream continues. Calls on other
/// streams do not block, with two exceptions. Several blocked streams can use up max_calls_in_flight. On the
/// staged and hybrid routes, two streams with unfinished calls use all staging buffers, and a call on a third
/// stream waits for one of them. The staged route enqueues about seven operations for each piece of rows (8
/// MiB, or less if staging_bytes is small).
///
/// The constructor page-locks a table that is not page-locked yet (read-only if it is a mapped file), unless
/// the route is `staged`. If that fails, only the staged route remains, and row_plan::reason says why. Pages
/// that pinflow has already registered for another object stay registered while the exchange exists. Memory
/// that was page-locked otherwise (a pinned_buffer, cudaHostRegister) must also stay page-locked that long.
///
/// If the option `route` is `automatic`, fixed rules decide how rows travel: by the sizes of rows, table and
/// call, the direction, where the indices are, the number of threads, and whether the table is a mapped file.
/// `tune` measures instead. No call measures by itself.
///
/// Truncated files: the CPU copies rows of files under the fault guard, or reads them with pread if it is not
/// installed. Kernels read registered pages, which stay valid when the file is truncated.
///
/// On the host device, `gather` and `scatter` run on the calling thread, and threads of oneTBB help with
/// large calls. On the routes `staged` and `hybrid`, threads of the exchange move the rows.
///
/// A stream that is being captured into a CUDA graph is refused with unsupported.
///
/// Besides the errors named with them, calls throw device_error, data_changed if the table's file has
/// changed, invalid_argument for a stream of another device, and invalid_argument for null pointers unless
/// there are no indices. Members may be called from several threads at once. The destructor waits until the
/// streams have passed the calls. Calls on a moved-from exchange throw invalid_argument, and its table is
/// empty.
class row_exchange {
 public:
    /// Page-locks the table and reserves the memory of calls. The first exchange of a CUDA device loads
    /// kernels. CUDA may wait for all of the device's streams then.
    /// @throws invalid_argument if `max_batch_rows`, `max_calls_in_flight`, `staged_share` or `route` is out
    /// of range.
    /// @throws unsupported if the route in the options cannot work; the message says why.
    /// @throws device_error or system_failure if memory is short.
    row_exchange(row_table table, pinflow::device device, const row_exchange_options& options = {});
    row_exchange(row_exchange&&) noexcept;
    row_exchange& operator=(row_exchange&&) noexcept;
    row_exchange(const row_exchange&) = delete;
    row_exchange& operator=(const row_exchange&) = delete;
    ~row_exchange();

    /// Copies row ids[i] of the table to row i of `destination`. Returns when the copy has finished.
    /// `destination` is device memory for ids.size() rows, with any alignment; it must not overlap the
    /// indices. Waits for no stream of the caller: work that writes the indices, or uses `destination`, must
    /// have finished.
    /// @throws invalid_argument for indices out of range (the message says how many, and names the first),
    /// and for a destination that overlaps the table, or its own indices in device memory.
    /// @throws unsupported for indices in device memory on the route `copy`.
    void gather(row_ids ids, std::byte* destination);
    /// The same in `stream`'s order: `destination` is written when the stream reaches the call, and complete
    /// when the stream has passed it.
    exchange_call gather_async(row_ids ids, std::byte* destination, stream_view stream);
    /// Gathers several batches as one group, which is faster for small rows of large tables. If the plan
    /// sorts rows, a row that several batches need crosses the link once. Batches travel together as long as
    /// they are at most 64 and have at most max_batch_rows rows; a larger group makes several calls. An index
    /// in device memory that is out of range stops only its call, and the error counts its position within
    /// that call.
    /// @throws as `gather`, and invalid_argument for a group that makes more calls than half of
    /// max_calls_in_flight (rounded up). It is not checked whether a destination overlaps the indices of
    /// another batch, which it must not.
    exchange_call gather_group_async(std::span<const row_gather> batches, stream_view stream);

    /// Copies row i of `source`, in device memory with any alignment, to row ids[i] of the table. Returns
    /// when the copy has finished. Waits for no stream of the caller: work that writes the indices or
    /// `source` must have finished.
    /// @throws invalid_argument for indices out of range, for a repeated index if `policy` is `error`, and
    /// for a source that overlaps the table, or a `policy` out of range.
    /// @throws unsupported if the table is read-only, or if the route is `copy` and `policy` is not `last`.
    /// @throws unsupported if `policy` is `sum`, unless the elements are little-endian float16, bfloat16,
    /// float32, float64 or 32- or 64-bit integers, and the rows and `source` are aligned to them.
    void scatter(row_ids ids, const std::byte* source, duplicate_policy policy = duplicate_policy::last);
    /// The same in `stream`'s order: `source` is read when the stream reaches the call, and the table is
    /// complete when the stream has passed it.
    exchange_call scatter_async(row_ids ids, const std::byte* source, duplicate_policy policy,
                                stream_view stream);
    /// Scatters all batches, in their order, as one scatter.
    /// @throws as `scatter` and `gather_group_async`, and unsupported for a group that makes several calls,
    /// unless `policy` is `last`.
    exchange_call scatter_group_async(std::span<const row_scatter> batches, duplicate_policy policy,
                                      stream_view stream);

    /// Throws the error of the oldest asynchronous call that has finished with one. Each error is thrown
    /// once. Does not wait, neither for calls nor for other threads. The exchange keeps the last 1024 errors.
    /// Older ones are thrown only by exchange_call::check.
    /// @throws the error in the indices of such a call, or in reading or writing its rows.
    /// @throws data_changed if the table's file has changed.
    void check();

    /// Measures the routes for calls of `batch_rows` rows, and for groups of 2, 4, ... up to `batches` (at
    /// most 64) such batches. From then on, such calls take the fastest route, in every exchange of this
    /// process with the same device, row size and options. Tables must also agree in whether they are mapped
    /// files, and in whether rows are aligned to 16 bytes. A call's number of rows, and a table's size in
    /// bytes, need only lie between the same two powers of two as those measured. An exchange made earlier
    /// without staging buffers does not take a route that needs them. Does nothing for what was measured
    /// before, and if there is no choice: on the host device, with a route set in the options, for a table
    /// that is not page-locked. Groups of more than max_batch_rows rows, 2^20 rows or 512 MiB are not
    /// measured. Reads rows of the table, and writes none: rates of scatters are estimated. Takes about a
    /// second for each group size, and device memory for up to 512 MiB of rows. Other work on the device or
    /// the link makes the measurement wrong.
    /// @throws device_error if the device lacks the memory.
    void tune(std::uint64_t batch_rows, unsigned batches = 1);

    /// The plan for `batches` batches of `batch_rows` rows copied as one group, with indices in host memory.
    /// Calls with indices in device memory may get another plan. Does not measure.
    row_plan plan_gather(std::uint64_t batch_rows, unsigned batches = 1) const;
    row_plan plan_scatter(std::uint64_t batch_rows, unsigned batches = 1) const;

    /// Whether kernels can access the rows in place: on a GPU, whether the exchange has made or found them
    /// page-locked. If not, all plans are staged, and their reason says why. False for a moved-from exchange.
    bool is_in_place() const noexcept;

    const row_table& table() const noexcept;
    const pinflow::device& device() const noexcept;

 private:
    std::unique_ptr<detail::exchange_state> state_;
};

}  // namespace pinflow
