#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/rows.hpp"
#include "pinflow/stream.hpp"
#include "pinflow/train/optimizer.hpp"

namespace pinflow {

/// Writes the first weights of a row. Called by several threads at once, in no particular order. Must not use
/// the table.
using weight_function = std::function<void(std::uint64_t row, std::span<float> weights)>;

/// Random weights, uniform from `low` to `high`. They are computed from counters (Salmon and others, Parallel
/// Random Numbers: As Easy as 1, 2, 3, 2011; Philox4x32-10), so the weights of a row depend on the seed and
/// on its index alone.
/// @throws invalid_argument unless low <= high, and both are finite.
weight_function uniform_weights(float low, float high, std::uint64_t seed);
/// The same for normally distributed weights, by the method of Box and Muller.
/// @throws invalid_argument unless the mean is finite, and the deviation is finite and not negative.
weight_function normal_weights(float mean, float deviation, std::uint64_t seed);

struct embedding_options {
    std::uint64_t row_count = 0;               ///< at least 1
    std::uint64_t columns = 0;                 ///< weights of a row: 1 to 16777216
    pinflow::dtype type = dtype::of<float>();  ///< of weights: float32, float16 or bfloat16
    pinflow::optimizer rule = adam{};
    weight_function weights = nullptr;                     ///< null: zeros
    std::uint64_t max_batch_ids = std::uint64_t{1} << 17;  ///< of one fetch, at least 1 and below 2^32
    /// How many steps can be prefetched; at most 8. The table takes device memory for 2 + 2 * look_ahead
    /// batches of max_batch_ids records, for their indices (24 bytes an id) and sums of gradients (a byte an
    /// id for every 32 columns), for device_rows, and for its row_exchange. To group ids, a GPU takes about
    /// 24 bytes more for each of max_batch_ids.
    unsigned look_ahead = 1;
    /// The first rows, at most row_count, stay in device memory: the frequent ones, if the vocabulary is
    /// sorted. Results do not depend on it.
    std::uint64_t device_rows = 0;
    /// Where the other rows lie: a writable table of `row_count` rows of embedding_table::record_size_bytes,
    /// such as writable_segment::table of an array of bytes. Its rows below device_rows are not used. Empty:
    /// page-locked memory that the table allocates.
    std::optional<row_table> storage = std::nullopt;
    /// Whether to start from the records in `storage`, which a table with the same options has written. False
    /// overwrites them with the first weights. True needs a device_rows of 0.
    bool keeps_records = false;
    /// Where device memory comes from; null: the device's pool.
    std::shared_ptr<memory_resource> resource = nullptr;
};

class embedding_table;

/// Rows on the device, from fetch to commit: each row once, in ascending order of ids. Dropping it without a
/// commit changes nothing in the table. Move-only. The stream of the fetch must outlive the lease.
class embedding_lease {
 public:
    embedding_lease(embedding_lease&&) noexcept;
    embedding_lease& operator=(embedding_lease&&) noexcept;
    embedding_lease(const embedding_lease&) = delete;
    embedding_lease& operator=(const embedding_lease&) = delete;
    ~embedding_lease();

    /// False once the lease was committed, written back or moved from. Then no other member may be called.
    bool is_valid() const noexcept;
    /// The number of different ids. If a GPU groups them (see embedding_table::prefetch), waits for that. It
    /// groups the ids of one fetch after the other, and waits for the streams of earlier leases that have
    /// used the same memory. If the ids of the fetch were in device memory, only the device knows the number:
    /// then this is position_count(), and rows from *device_row_count() on are undefined.
    /// @throws device_error.
    std::uint64_t row_count() const;
    /// The number of different ids, in device memory. Valid as long as the lease, for work that is ordered
    /// after the fetch.
    const std::uint64_t* device_row_count() const;
    /// The ids of the rows: *device_row_count() numbers in device memory, valid as device_row_count.
    const std::uint64_t* device_ids() const;
    /// The weights of row i begin at weights() + i * stride_bytes(), in device memory.
    std::byte* weights() const;
    std::uint64_t stride_bytes() const;
    /// For each id of the fetch, in its order, the row that has it: position_count() numbers in device
    /// memory.
    const std::int64_t* positions() const;
    std::uint64_t position_count() const;
    /// The ids of the rows, in host memory; valid as long as the lease. If a GPU groups them, waits as
    /// row_count, and until they have been copied from there.
    /// @throws device_error; unsupported if the ids of the fetch were in device memory.
    std::span<const std::uint64_t> ids() const;

 private:
    friend class embedding_table;
    struct state;
    explicit embedding_lease(std::unique_ptr<state> held);
    const state& valid() const;

    std::unique_ptr<state> state_;
};

/// A table of embeddings larger than the device, with the optimizer's state beside the weights of each row.
/// A step fetches the rows that a batch needs, and commits their gradients:
///
///     embedding_lease lease = table.fetch(ids, stream);
///     table.prefetch(next_ids);                        // moves rows while the device computes
///     ...                                              // forward and backward, on `stream`
///     table.commit(std::move(lease), gradients, dtype::of<float>(), stream);
///
/// Only rows that are fetched and committed change. Each row counts its own steps. So a row behaves like a
/// parameter of its own that skips the steps in which it has no gradient: moments do not decay meanwhile, and
/// bias corrections are those of the row. torch.optim.SparseAdam decays the same way, but counts all steps;
/// dense optimizers with momentum or decay also move rows without a gradient. Arithmetic and state are
/// float32. Results are the same bits on every device, with every look_ahead and device_rows, and equal to
/// those of one row after the other.
///
/// Functions enqueue, and do not wait for the device except where they say so. A commit may come on another
/// stream than its fetch; other work on the rows and gradients must be ordered by the caller. A stream that
/// is being captured into a CUDA graph is refused with unsupported. The memory of a lease that is dropped
/// during such a capture, or after the device has failed, is not used again. One thread at a time may use a
/// table. In a forked process, functions that use its rows throw device_error.
class embedding_table {
 public:
    /// The bytes of a record: weights, states and the number of steps, each padded to a multiple of 16 bytes.
    /// The whole is padded to a multiple of 64 bytes if it grows by at most an eighth: the link moves such
    /// records faster.
    /// @throws as the constructor.
    static std::uint64_t record_size_bytes(const embedding_options& options);

    /// Writes the first weights with all cores, unless `keeps_records` is set, and waits until they are
    /// written.
    /// @throws invalid_argument for options out of range, settings that check_settings refuses, and storage
    /// whose number or size of rows differs; unsupported for another type of weights, and for storage that
    /// cannot be written; device_error or system_failure if memory is short; what options.weights throws.
    embedding_table(embedding_options options, const device& device);
    embedding_table(embedding_table&&) noexcept;
    embedding_table& operator=(embedding_table&&) noexcept;
    embedding_table(const embedding_table&) = delete;
    embedding_table& operator=(const embedding_table&) = delete;
    /// Waits until all commits are written, and until the streams of leases have passed their last use. If
    /// leases are left, the last of them waits.
    ~embedding_table();

    const embedding_options& options() const;
    const pinflow::device& device() const;

    /// Begins to move the rows of a later fetch, of the same ids in the same order. Changes no result. A GPU
    /// whose kernels move the rows in place groups 2048 ids and more itself. Otherwise, if there are 8192 ids
    /// or more, up to two background threads group them and enqueue the work; `fetch` throws the errors of
    /// that work. Without these threads, this waits while the memory that it reuses holds ids of an earlier
    /// step that are not grouped yet.
    /// @throws as `fetch`; invalid_argument also if look_ahead steps are prefetched already; unsupported for
    /// ids in device memory.
    void prefetch(row_ids ids);
    /// Forgets what was prefetched and not fetched, for example when the order of batches changes. Waits
    /// until background threads have grouped its ids.
    void cancel_prefetches();
    /// The rows of `ids`, as all commits called before have left them, in the order of `stream`. Waits until
    /// the CPU has grouped ids in host memory, unless a GPU does. Without a matching prefetch, it also waits
    /// while the memory that it reuses holds ids of an earlier step that are not grouped yet.
    ///
    /// The device groups ids in device memory, in the order of `stream`, whose later work may overwrite them.
    /// If some are outside the table, *device_row_count() and all positions are 0, the rows are undefined,
    /// and the commit changes nothing. Once the device has finished such a fetch, the error is thrown by the
    /// commit or write_back of the lease, or by the next prefetch, fetch or member that waits for all
    /// commits, but only once. A prefetch or fetch that throws the error of another fetch has done nothing,
    /// and can be repeated. Until `stream` reaches the fetch, the table's later groupings, gathers and writes
    /// wait, also those for other streams.
    /// @throws invalid_argument for ids outside the table (the message says how many, and names the first),
    /// for more than max_batch_ids, and for a stream of another device. Nothing has moved then.
    /// @throws unsupported for ids in device memory if the device cannot access the storage in place.
    /// @throws all_slots_leased if all steps are in use: by leases, by prefetches, and by commits that a
    /// lease which was fetched before them may need for its own commit. So while one lease is kept, at most
    /// 1 + 2 * look_ahead others can be committed.
    /// @throws device_error, system_failure, also of a prefetch.
    embedding_lease fetch(row_ids ids, stream_view stream);
    /// Makes one step of the rule on each row of the lease, as other commits have left it, and writes it
    /// back. `gradients` has a row of `columns` numbers for each id of the fetch, contiguous, in device
    /// memory. Those of equal ids are added in their order, as float32. `type` is that of the gradients:
    /// float32, float16 or bfloat16.
    /// @throws invalid_argument for a lease of another table, for a stream of another device, for null
    /// gradients, and for wrong ids in device memory, if the device has finished their fetch.
    /// @throws unsupported for gradients of another type, and for a stream that is being captured.
    /// After all of these but wrong ids, the lease is still valid. Any other error ends it.
    void commit(embedding_lease&& lease, const std::byte* gradients, const pinflow::dtype& type,
                stream_view stream);
    /// Writes back what the caller has written to the weights of the lease; what others have committed to its
    /// rows since the fetch is lost.
    /// @throws as `commit`, for leases, streams and ids.
    void write_back(embedding_lease&& lease, stream_view stream);
    /// The rate of all later commits, on any stream.
    /// @throws invalid_argument if it is negative or not finite.
    void set_rate(double rate, stream_view stream);

    /// Copies the weights of rows to host memory: row i of `destination` gets those of row ids[i]. Waits
    /// for all commits.
    /// @throws invalid_argument for ids outside the table, and for a destination of another size; unsupported
    /// for ids in device memory.
    void read_weights(row_ids ids, std::span<std::byte> destination);
    /// Replaces the weights of rows by those in host memory: row ids[i] gets row i of `weights`. If an id
    /// repeats, its last row counts. The rows keep their state and number of steps. Waits for all commits.
    /// Forgets what was prefetched.
    /// @throws as read_weights; invalid_argument also while leases are held.
    void write_weights(row_ids ids, std::span<const std::byte> weights);

    /// Appends rows with their first weights, until the table has `row_count` rows. Until it returns, the
    /// host needs memory for the old and the new table, and the device for two row_exchanges. Waits and
    /// forgets as write_weights.
    /// @throws invalid_argument for fewer rows, and while leases are held; unsupported for a table with
    /// `storage`; system_failure or device_error if memory is short; what options.weights throws. The table
    /// has not changed then.
    void grow(std::uint64_t row_count);

    /// Writes the weights of all rows as a .npy file of the shape (row_count, columns), atomically, with some
    /// MiB of memory. Waits for all commits.
    /// @throws system_failure.
    void export_weights(const std::filesystem::path& path);
    /// Replaces the weights of all rows by an array of the shape (row_count, columns), of any type that can
    /// be cast to the table's, in a file that `open` reads. A bfloat16 table reads `|V2` as bfloat16, because
    /// .npy files lack that type. Rows keep their state and number of steps. Waits and forgets as
    /// write_weights.
    /// @throws as `open`; invalid_argument for another shape, and while leases are held; unsupported for
    /// other types; data_changed if the file is modified meanwhile. If reading fails midway, some rows have
    /// new weights.
    void import_weights(const std::filesystem::path& path);

    /// Writes weights, state and numbers of steps as safetensors, atomically, with the name of the rule. The
    /// tensors are "weights", one for each state, with its name in torch.optim, and "step". Waits for all
    /// commits.
    /// @throws system_failure.
    void save(const std::filesystem::path& path);
    /// Reads what `save` wrote for a table of as many rows and columns, with the same rule and type, and any
    /// device_rows and storage. Settings are not saved. Later steps are bit-equal to those without the
    /// interruption. Waits and forgets as write_weights.
    /// @throws state_mismatch if rule, type or shape differ, unsupported for tensors of a type that pinflow
    /// lacks, invalid_argument while leases are held; then nothing has changed.
    /// @throws format_error, data_changed, system_failure; if reading fails midway, the table is part old,
    /// part new.
    void load(const std::filesystem::path& path);
    /// Waits until all commits are written, and all fetches of ids in device memory are finished.
    /// @throws device_error; what reading or writing the rows has thrown; invalid_argument for wrong ids in
    /// device memory. The other members that wait for all commits throw the same.
    void synchronize();

 private:
    struct state;
    friend struct embedding_lease::state;
    state& valid() const;

    std::shared_ptr<state> state_;
};

}  // namespace pinflow
