#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/loader/batch.hpp"
#include "pinflow/loader/report.hpp"
#include "pinflow/loader/route.hpp"
#include "pinflow/loader/sampler.hpp"
#include "pinflow/loader/shard.hpp"
#include "pinflow/loader/state.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/stream.hpp"

namespace pinflow {

struct loader_options {
    pinflow::device device = pinflow::device::best();
    /// Samples in a batch, at least 1. The last batch of an epoch may have fewer.
    std::uint64_t batch_rows = 64;
    /// sequential, shuffled or windowed. For any other order, set `sampler`.
    pinflow::order order = order::sequential;
    /// The seed of the shuffled and the windowed order.
    std::uint64_t seed = 0;
    /// Window of the windowed order, in rows. 0: 64 MiB of samples. Other orders need 0.
    std::uint64_t window_rows = 0;
    /// An order of any kind, made for as many rows as the sources have. If it is set, `order`, `seed` and
    /// `window_rows` must keep their defaults.
    std::optional<pinflow::sampler> sampler = std::nullopt;
    /// Epochs in total, including those delivered before `resume_from`. The loader delivers nothing if
    /// this is 0, or if it begins after the last epoch.
    std::uint64_t epochs = 1;
    /// The maximum number of batches, counted in steps from where the loader begins: a step in which this
    /// rank has no batch counts too, so that all ranks end at the same position.
    std::optional<std::uint64_t> max_batches = std::nullopt;
    /// The part of each epoch that this loader delivers.
    pinflow::shard shard = {};
    pinflow::tail tail = tail::partial;
    /// Where to continue, from batch::state or loader::state. If empty, the loader begins at the beginning.
    /// The order, its seed and window, and the data must be those of the state; everything else may differ.
    /// With the same batch size, shard and tail, the loader delivers the same batches as without an
    /// interruption. Otherwise all ranks together deliver the same samples, but tail::drop may leave out
    /// others.
    std::optional<loader_state> resume_from = std::nullopt;
    /// The epoch to begin with, without `resume_from`. The epochs before it count towards `epochs`,
    /// as after a resume. Unlike `resume_from`, this does not check that the data is the same.
    std::uint64_t first_epoch = 0;
    pinflow::route route = route::automatic;
    /// Upper bound on the memory of all slots and of arrays held on the device, in bytes. The constructor
    /// throws invalid_argument if the slots do not fit.
    /// 0 means 1 GiB, and at most half of the host memory that is left (machine, cgroup, `ulimit -v`); two
    /// slots are always allowed if they fit into what is left. If `slots` is set, 0 means no bound but the
    /// host memory that is left.
    ///
    /// If rows may be staged in slots (on the host only with route::staged), each slot also has a pinned
    /// staging buffer of the same size, which counts too. On a GPU, all slots may share staging buffers
    /// instead: 4 MiB for each thread, at most 64 MiB, which count too. They do so if all of these hold: the
    /// arrays that are not held are staged or read (not decoded), or copied by the copy engine from pages
    /// that are registered meanwhile; their rows have at most 2 MiB; one of them has 1 MiB or more in a
    /// batch; and the buffers take at most a quarter of the memory.
    ///
    /// A slot also counts 8 bytes for each row, and 24 more for each row and array if pages of any array are
    /// registered. Not counted: 32 KiB for each slot and array that the copy engine copies from a file, and
    /// lists for GPU kernels. For each row of each slot they take 16 bytes for each array that a kernel
    /// gathers, or 28 if the rows are sorted, and 16 bytes for all held arrays together. Sorting an array
    /// also takes 12 to 16 bytes of scratch memory for each row of at most 64 slots.
    std::uint64_t memory_bytes = 0;
    /// The number of batches that can exist at once (being filled, ready or leased); at least 2. 0 lets the
    /// loader choose: 8, or more for small batches, which are filled in groups (four groups, or eight
    /// if all rows pass through shared staging buffers; at most 256 batches, and no more than an epoch has,
    /// unless that is less than 8). If memory is short it takes fewer, down to 2, and
    /// loader_report::slots_reason says so.
    unsigned slots = 0;
    /// The most threads that gather rows at the same time; more than 1024 count as 1024. 0 means one for each
    /// core, fewer if memory is short. A number above the core count raises oneTBB's limit for the process
    /// while the loader lives. If the system starts fewer, the loader works with those; see
    /// loader_report::threads_reason.
    unsigned threads = 0;
    /// Budget for the memory that pinflow page-locks in this process, as pin_options::budget_bytes. Rows
    /// that do not fit are staged or read. If `route` is direct or copy, the constructor throws unsupported
    /// instead.
    std::uint64_t pin_budget_bytes = 0;
    /// As pin_options::limit.
    pinflow::pin_limit pin_limit = pinflow::pin_limit::memory;
    /// Where slots and row lists get device memory when the loader is made, and held arrays soon after, on a
    /// thread of the loader's. Null: from the device's stream-ordered pool. Batches keep the resource alive.
    std::shared_ptr<memory_resource> device_memory = nullptr;
};

/// Delivers the rows of one or several sources as batches on a device, ahead of the consumer. The slots bound
/// its memory. From construction on, a pipeline (sample, fill, deliver) prepares batches on a thread of the
/// loader and on oneTBB's workers.
///
/// The loader reads rows ahead, into the next epoch too. After changing memory that a source points to, make
/// a new loader.
///
/// The loader keeps its sources alive. A batch keeps the parts of the loader and the sources that it needs
/// alive, so that it may outlive both. Memory that a source points to but does not keep alive must outlive
/// the loader and its batches.
///
/// `next` may be called from several threads. The destructor stops the pipeline at any point; leased batches
/// stay valid. It does not wait for the consumer's streams. (CUDA waits if pinflow has no context of its own
/// for page-locked memory: on a GPU of less than 10 GiB, if less than 1 GiB was free when memory was first
/// page-locked, or if the context could not be created.) In a process forked later, a loader
/// cannot be used: `next` throws, and the destructor leaves everything as it is. A moved-from loader delivers
/// nothing: `next`, `wait_for`, `report` and `state` throw invalid_argument, and counts are 0.
class loader {
 public:
    /// A sample is the same row of every source; row counts must be equal.
    /// On a GPU, the routes direct and copy make the constructor wait until all pages are registered.
    /// The first loader that gathers rows with a kernel on a CUDA device loads the kernels. CUDA may then
    /// wait for all of the device's streams.
    /// @throws invalid_argument for options that contradict each other or the sources.
    /// @throws state_mismatch for a state of other data or of another order.
    /// @throws unsupported for a route that cannot work here, and for more than 2^30 rows if all arrays have
    /// rows of 0 bytes.
    /// @throws data_changed if pages that a route needs cannot be registered because their file has changed.
    /// @throws system_failure if the slots or threads need more memory than the machine and its cgroup have
    /// left.
    /// @throws device_error; if `resume_from` is set, also the errors of reading some rows.
    explicit loader(std::vector<std::shared_ptr<const row_source>> sources,
                    const loader_options& options = {});
    loader(loader&&) noexcept;
    loader& operator=(loader&&) noexcept;
    ~loader();

    /// Returns the next batch, or nothing when all epochs, or the steps of `max_batches`, are over. `stream`
    /// is made to wait for the data. When the lease ends, the slot waits for the work that is on `stream` at
    /// that time, so the stream must outlive the lease.
    ///
    /// The calling thread waits until the copy of the batch is enqueued. On a GPU, if the slots of a full
    /// group (one slot if batches are large) take 8 MiB or more, every call waits until the data has arrived:
    /// a waiting stream polls over PCIe and takes up to 7 % of the link. A call waits for earlier work on
    /// `stream` only if that work still uses the slot that the batch needs.
    ///
    /// An error in the pipeline is thrown here once, after all batches before it. After that, `next` returns
    /// nothing. If a wait fails, or `stream` cannot be made to wait, the batch is not lost: the next call
    /// returns it.
    /// @throws invalid_argument for a stream of another device.
    /// @throws unsupported for a stream that is being captured into a CUDA graph; the batch is not lost.
    /// @throws all_slots_leased if the consumer's batches and tensors hold every slot that is not lost.
    /// @throws device_error, also in a process forked later.
    /// @throws the error of the pipeline: data_changed, system_failure, format_error, or what a custom order
    /// or row_source throws.
    std::optional<batch> next(stream_view stream);
    /// The same for a consumer without a stream: returns when the data has arrived. The slot waits for no
    /// stream when the lease ends, except for those named with batch::used_on.
    std::optional<batch> next();

    /// Undoes the `next` that has returned this batch: it comes again, before later batches, and is not
    /// counted as returned. For a consumer that is interrupted before it has used the batch. No work on it
    /// may have been enqueued. Thread-safe.
    /// @throws invalid_argument for a batch of another loader, a released one, and one of which there are
    /// tensors; device_error in a process forked later.
    void take_back(batch&& unused);

    /// Waits until `next` has something to return (a batch, the end or an error), but no longer than
    /// `timeout`. Returns whether it has. For consumers that have to look after something else meanwhile,
    /// such as signals. `next` may still wait for the batch's data, as it always does. If several threads
    /// call `next`, another one may take the batch before.
    /// @throws device_error in a process forked later.
    bool wait_for(std::chrono::nanoseconds timeout);

    /// Ends the filling of batches. `next` still returns the batches that were ready, and then nothing, also
    /// to a caller that waits. Leased batches stay valid. Does not wait. Thread-safe.
    void stop() const noexcept;
    /// The number of samples in the data. Thread-safe, like all members below.
    std::uint64_t row_count() const noexcept;
    /// The number of batches of this shard in a whole epoch.
    std::uint64_t batches_per_epoch() const noexcept;
    /// The number of batches, and of samples in them, that this loader delivers from its start to its end.
    std::uint64_t batch_total() const noexcept;
    std::uint64_t row_total() const noexcept;
    const pinflow::device& device() const noexcept;
    loader_report report() const;
    /// The state after the furthest batch that `next` has returned. Before the first batch it is the state
    /// that this loader began with. Once all batches have been returned and `next` returns nothing, it is the
    /// end of all epochs, or of `max_batches`. After an error in the pipeline it stays the state after the
    /// furthest batch, so it can be saved and resumed from.
    /// If `next` threw for a batch that has not been redelivered, this is the state before that batch.
    /// Batches after it are delivered again on resume.
    /// @throws as batch::state.
    loader_state state() const;

 private:
    class pipeline;
    pipeline& valid_pipeline() const;

    std::unique_ptr<pipeline> pipeline_;
};

}  // namespace pinflow
