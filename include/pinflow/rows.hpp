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
/// Signed ones are taken as they are: a negative one is outside every table. Borrows them, as a span does:
/// what they lie in must outlive this.
class row_ids {
 public:
    /// Of std::uint64_t or std::int64_t in host memory (where these are long, long long is another type): a
    /// vector, an array, a span or the like; a vector that is a temporary is refused, as it would be gone
    /// before its numbers are read.
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
    /// `rows`, which may be written: memory of the process's own, a pinned_buffer's best. `element` is what a
    /// row is made of, where its sums are asked for. `owner` keeps the memory; without one it must outlive
    /// whatever the table is given to. @throws invalid_argument unless `rows` are a whole number of rows, and
    /// rows of elements.
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
    /// Thread blocks that move rows on the direct and the hybrid route, on CUDA; 0: the planner's. Of 256
    /// threads to scatter; of 1024 to gather, of 512 where something is not at multiples of 16 bytes. An even
    /// number of 1024 comes in clusters of two if the GPU has those, and waits until another kernel leaves
    /// two neighbouring multiprocessors; an odd one does not.
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
    unsigned batches = 1;     ///< worth taking together where so many are known: within 3 % of the best rate
    /// GB (1e9 bytes) a second: measured, or of scatters what measured gathers let expect; 0 when nothing was
    /// measured.
    double gbps = 0;
    std::string reason;  ///< one sentence; says what the options set
};

/// Moves rows between a table in host memory and a device, by their numbers: `gather` to the device,
/// `scatter` back.
///
/// Indices are checked before any row is touched. Those in host memory are checked, and read, before a call
/// returns; those in device memory when the stream comes to them: a call with wrong ones moves nothing, and
/// `check`, or the next call, throws.
///
/// Asynchronous calls only enqueue: on the stream they are given, and on streams of the exchange's own that
/// wait for it, and that it waits for. Table, destinations, sources and indices in device memory must stay
/// until the stream has passed the call. Indices in host memory, and lists of batches, are the caller's again
/// when the call returns; the stream may be destroyed then. What the device and the CPU write through several
/// exchanges or streams at once is for the caller to keep apart. CUDA lets some hundred operations wait in a
/// stream: a call that comes to a stream held up with so many (the staged route enqueues some seven for every
/// piece of rows, of 8 MiB unless staging_bytes is small) returns only when it goes on.
///
/// With a table that is not page-locked yet, construction page-locks it (read-only, when it is a mapped
/// file), unless the route is `staged`; where that fails the staged route remains, and `plan` says why.
/// Pages that pinflow has registered for somebody else are held for as long as the exchange exists; memory
/// that others have page-locked (a pinned_buffer, cudaHostRegister) must stay so for as long. The first call
/// for rows of some size and number measures for some tenths of a second, once in a process, with device
/// memory for up to 512 MiB of rows. On the host device the routes direct, copy and hybrid, when they are
/// asked for, touch a file's pages, which is a fault when it has been truncated; otherwise they are read. On
/// CUDA the CPU's share of the routes staged and hybrid is read from a file, too, or copied under the fault
/// guard where that is installed. Kernels read registered pages, which a truncation does not take from them.
///
/// Beside what is said with them, calls throw what `check` throws, invalid_argument for null pointers unless
/// there are no indices, and device_error. Members may be called from several threads; calls are enqueued one
/// at a time. The destructor waits until the streams have passed the calls. Calls on one that was moved from
/// throw invalid_argument, and its table is empty.
class row_exchange {
 public:
    /// The first one of a CUDA device loads kernels, for which CUDA may wait for all of the device's streams.
    /// @throws unsupported when the route asked for cannot work: the sentence says why.
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
    /// Several batches together, which small rows of large tables want: where the plan sorts them, a row that
    /// several batches ask for crosses the link once. More than 64 batches go 64 at a time, and wrong indices
    /// in device memory keep back those 64 only, among which their positions are counted.
    void gather_group_async(std::span<const row_gather> batches, stream_view stream);

    /// Row i of `source`, in device memory, becomes row ids[i] of the table. @throws invalid_argument for
    /// indices outside the table, for repeated ones when that is an error, and for a source that overlaps the
    /// table; unsupported for a table that cannot be written, for sums unless the table's elements are
    /// little-endian float16, bfloat16, float32, float64 or whole numbers of 32 or 64 bits, and rows and
    /// `source` aligned to them, and for all but the last on the route copy.
    void scatter(row_ids ids, const std::byte* source, duplicate_policy policy = duplicate_policy::last);
    /// The same in `stream`'s order: `source` is read when the stream comes to the call, and the table whole
    /// when it has passed it.
    void scatter_async(row_ids ids, const std::byte* source, duplicate_policy policy, stream_view stream);
    /// As one scatter of all batches, one behind the other. @throws as `scatter`, and unsupported for more
    /// than 64 batches unless the last row counts.
    void scatter_group_async(std::span<const row_scatter> batches, duplicate_policy policy,
                             stream_view stream);

    /// Every call does this first. @throws what was wrong with the indices of an asynchronous call that has
    /// finished, or with reading its rows: the oldest first, once for each call; data_changed when the
    /// table's file is not what it was.
    void check();

    /// How `batches` batches of `batch_rows` rows together would be moved, and how many are worth taking
    /// together, with indices in host memory: calls with some in device memory are measured for themselves,
    /// and may have another plan. Measures, for about a second, when that is not known yet, for which rows of
    /// the table are read.
    row_plan plan_gather(std::uint64_t batch_rows, unsigned batches = 1);
    row_plan plan_scatter(std::uint64_t batch_rows, unsigned batches = 1);

    const row_table& table() const noexcept;
    const pinflow::device& device() const noexcept;

 private:
    std::unique_ptr<detail::exchange_state> state_;
};

}  // namespace pinflow
