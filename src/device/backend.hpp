#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "src/device/conversion_work.hpp"
#include "src/device/flat_work.hpp"
#include "src/device/record_work.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail {

class page_locker;

/// One array of a batch, as the digest reads it: rows of `row_size_bytes`, contiguous.
struct digest_array {
    const std::byte* rows = nullptr;
    std::uint64_t row_size_bytes = 0;
};

/// Runs of bytes at equal distances in host memory, which become contiguous in device memory.
struct strided_copy {
    std::byte* destination = nullptr;
    const std::byte* source = nullptr;  ///< the first run
    std::uint64_t run_bytes = 0;
    std::uint64_t stride_bytes = 0;  ///< from one run to the next
    std::uint64_t run_count = 0;

    std::uint64_t size_bytes() const noexcept { return run_count * run_bytes; }
};

/// Operations of a device. The public classes of device.hpp, stream.hpp and buffer.hpp are thin owners over
/// it.
/// There is one object per device, and it lives until the process ends. Any thread may call any member.
/// Streams and events are opaque pointers made by the backend. A stream may also be a foreign handle of the
/// backend's kind.
/// On CUDA, members that enqueue work block while the stream's queue is full.
/// Members that are not noexcept throw device_error. On the host, they also throw system_failure if memory or
/// a thread is lacking, and invalid_argument for a null handle of a stream.
class device_backend {
 public:
    virtual ~device_backend() = default;

    virtual device_kind kind() const noexcept = 0;
    virtual int index() const noexcept = 0;
    virtual std::string model() const = 0;
    virtual device::memory_sizes memory() const = 0;

    virtual void* create_stream() = 0;
    /// A stream for synchronous calls. On the host, work runs on the thread that enqueues it, one function at
    /// a time, which saves waking a thread for each call.
    virtual void* create_synchronous_stream() { return create_stream(); }
    /// Waits for the enqueued work, and ignores its errors. In a forked process, which lacks the stream's
    /// work, does nothing.
    virtual void finish_stream(void* stream) noexcept = 0;
    /// Destroys the stream without waiting: the enqueued work still runs. In a forked process, does nothing:
    /// the stream is leaked.
    virtual void destroy_stream(void* stream) noexcept = 0;
    virtual void synchronize_stream(void* stream) = 0;
    virtual bool stream_done(void* stream) = 0;
    /// Whether work enqueued on the stream now would be recorded in a CUDA graph instead of being executed,
    /// or refused because another stream is being captured.
    virtual bool is_capturing(void* stream) = 0;
    /// The stream in which any thread can record an event after the work enqueued on `stream`: `stream`
    /// itself. For cudaStreamPerThread, whose handle means another stream on each thread, it is the legacy
    /// default stream, which waits for all of them.
    virtual void* stream_for_marks(void* stream) noexcept { return stream; }
    /// Enqueues `work`, which must not throw and must not call CUDA.
    virtual void enqueue_host_function(void* stream, std::function<void()> work) = 0;

    virtual void* create_event() = 0;
    virtual void destroy_event(void* event) noexcept = 0;
    virtual void record_event(void* event, void* stream) = 0;
    virtual void stream_wait_event(void* stream, void* event) = 0;
    /// Gives up after `timeout`; on CUDA, up to 0.1 ms later.
    /// @return whether the event has passed.
    virtual bool synchronize_event_for(void* event, std::chrono::microseconds timeout) = 0;
    virtual void synchronize_event(void* event) = 0;
    virtual bool event_done(void* event) = 0;

    /// Allocates memory, aligned to 256 bytes, in the order of `stream`. `size_bytes` is at least 1.
    virtual std::byte* allocate(std::uint64_t size_bytes, void* stream) = 0;
    /// Releases memory once `stream` has completed the work enqueued so far and `events` have passed. On the
    /// host, a null handle is a stream that has ended. On CUDA, later work on `stream` waits for `events`
    /// too. Does not wait, unless host memory is exhausted or the stream's queue is full. Moved-from events
    /// count as passed.
    virtual void release(std::byte* data, std::uint64_t size_bytes, void* stream,
                         std::span<const event> events) noexcept = 0;
    /// Allocates zero-filled memory, aligned to 4096 bytes. `size_bytes` is at least 1.
    virtual std::byte* allocate_pinned(std::uint64_t size_bytes) = 0;
    /// Releases the memory at once: no work may use it any more.
    virtual void release_pinned(std::byte* data, std::uint64_t size_bytes) noexcept = 0;

    // The copies to and from the host, except the strided one and conversions, implement the functions of
    // pinflow/buffer.hpp with these names and `_async`. Ranges of size 0 are ignored.

    virtual void copy_to_device(std::byte* destination, std::span<const std::byte> source, void* stream) = 0;
    virtual void copy_to_host(std::span<std::byte> destination, const std::byte* source, void* stream) = 0;
    virtual void copy_batch_to_device(std::span<const copy_range> ranges, void* stream) = 0;
    /// Enqueues one copy. All bytes from the first run to the last one must be in one registration or one
    /// pinned buffer.
    virtual void copy_strided_to_device(const strided_copy& runs, void* stream) = 0;
    /// Enqueues one conversion. Casts have the bits of cast_elements (src/core/cast.hpp).
    virtual void convert_to_device(const device_conversion& work, void* stream) = 0;
    virtual void copy_batch_to_host(std::span<const host_copy_range> ranges, void* stream) = 0;
    virtual void copy_on_device(std::byte* destination, const std::byte* source, std::uint64_t size_bytes,
                                void* stream) = 0;
    virtual void fill_zero(std::byte* data, std::uint64_t size_bytes, void* stream) = 0;

    /// Enqueues the digest of `row_count` samples (see pinflow/loader/digest.hpp) and adds it to the 64-bit
    /// word at `sum` in device memory. `arrays` is read before the call returns. The rows must stay valid
    /// until `stream` has completed this work.
    virtual void add_digest(std::span<const digest_array> arrays, std::uint64_t row_count, std::uint64_t* sum,
                            void* stream) = 0;

    /// The locker that page-locks host memory in place for this device; null if the device reads all host
    /// memory. It is never destroyed.
    virtual page_locker* locker() = 0;
    /// Whether the device can read `size_bytes` of host memory at `data` under its host address. The answer
    /// holds as long as the owner keeps the memory allocated or registered.
    /// On CUDA this is false for pages that pinned_pages has registered in place, because their holder may
    /// release them: hold such pages through pinned_pages. It is true for pinned buffers.
    virtual bool reaches(const std::byte* data, std::uint64_t size_bytes) = 0;

    // Rows by index. `ids` are in device memory. row_work.hpp says where the memory of the structures is. All
    // of it must stay valid until the stream has completed the work. Structures are read before the call
    // returns.

    /// Loads the kernels that the functions below launch, and reserves memory for host functions. Must be
    /// called before them, except before sort_scratch_bytes. Later calls load nothing. While CUDA loads a
    /// kernel, it may wait for all streams. At a kernel's first launch, this would be a deadlock if a stream
    /// is held back until the launch returns.
    virtual void prepare_rows() = 0;
    /// Finds the indices that are `row_count` or more. Overwrites *errors.found. `count` is at least 1.
    virtual void check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                            const error_memory& errors, void* stream) = 0;
    /// The scratch memory that sorting up to `count` indices of a table of `row_count` rows by `kernels`
    /// takes.
    virtual std::uint64_t sort_scratch_bytes(std::uint64_t count, std::uint64_t row_count,
                                             sort_kernels kernels) = 0;
    /// Writes the indices in ascending order, and the position of each. Equal indices stay in the order of
    /// their positions. With `errors`, checks the indices as check_rows does. CUDA compares only the lowest
    /// bits, as many as `row_count` - 1 has.
    virtual void sort_rows(const row_sort& sort, void* stream) = 0;
    /// Adds the repeated indices of a sorted order to *errors.found, which the sort has written. `ids` are
    /// the unsorted indices.
    virtual void refuse_repeated_rows(const row_order& order, const std::uint64_t* ids,
                                      const error_memory& errors, void* stream) = 0;
    /// Copies rows from the table to the batches, each to its position. In a sorted order, rows of equal
    /// indices are copied to the first position only. With row_transfer::report, checks the indices first.
    virtual void gather_rows(const row_transfer& transfer, void* stream) = 0;
    /// Copies rows from tables in device memory to the batches.
    virtual void gather_held(const held_gather& gather, void* stream) = 0;
    /// Copies the rows of equal indices from their first position to the others. Enqueue it after all gathers
    /// of the order, by kernel and staged.
    virtual void repeat_rows(const row_transfer& transfer, void* stream) = 0;
    /// Copies rows from the batches to the table. The order must be sorted, unless all its indices differ. On
    /// the host device, it need not be sorted if the last one of repeated rows is written. For a sum, `type`
    /// is the type of the elements. The table, its row size and the batches are then aligned to the size of
    /// an element.
    virtual void scatter_rows(const row_transfer& transfer, repeated_rows repeated, sum_type type,
                              void* stream) = 0;

    // Flat parameters. flat_work.hpp says where the memory of the structures is. All of it must stay valid
    // until the stream has completed the work. Structures are read before the call returns.

    /// Loads the kernels that the functions below launch for `rule`. Must be called before them: see
    /// prepare_rows.
    virtual void prepare_updates(rule_kind rule) = 0;
    /// Sums the squares of all gradients and notes whether all are finite, with one kernel, for the step that
    /// follows.
    virtual void check_gradients(const gradient_check& work, void* stream) = 0;
    /// Updates all parameters, with one kernel.
    virtual void update_parameters(const flat_step& work, void* stream) = 0;

    // Records of embedding tables. record_work.hpp says where the memory of the structures is; otherwise as
    // for flat parameters.

    /// Loads the kernels that the functions below launch for `rule`: see prepare_rows.
    virtual void prepare_records(rule_kind rule) = 0;
    /// Groups equal indices that sort_rows has sorted.
    virtual void group_rows(const row_grouping& grouping, void* stream) = 0;
    virtual void patch_records(const record_patch& work, void* stream) = 0;
    virtual void update_records(const record_update& work, void* stream) = 0;

    /// Writes a number in device memory.
    virtual void set_number(double* destination, double value, void* stream) = 0;
};

/// The host's backend.
device_backend& host_backend();

/// The backend of CUDA device `index`. Only in builds with CUDA.
/// @throws device_error if there is no such device, or if it cannot be used.
device_backend& cuda_backend(int index);
/// The number of CUDA devices; 0 without a driver, or if cuda:0 is too old. Other devices are not checked.
/// Only in builds with CUDA.
/// @param none_reason receives the reason if the number is 0; may be null.
int cuda_device_count(std::string* none_reason) noexcept;

}  // namespace pinflow::detail
