#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"
#include "src/device/cuda/blocks_for.hpp"
#include "src/device/cuda/context.hpp"
#include "src/device/cuda/conversions.hpp"
#include "src/device/cuda/copy_list.hpp"
#include "src/device/cuda/digest.hpp"
#include "src/device/cuda/digest_kernels.hpp"
#include "src/device/cuda/flat_kernels.hpp"
#include "src/device/cuda/host_functions.hpp"
#include "src/device/cuda/pinned_memory.hpp"
#include "src/device/cuda/record_kernels.hpp"
#include "src/device/cuda/row_kernels.hpp"
#include "src/device/pin_limits.hpp"
#include "src/device/pin_registry.hpp"

namespace pinflow::detail {

namespace cuda {
namespace {

/// The major number of the lowest supported compute capability: default builds have no code below 8.0.
constexpr int min_capability = 8;
/// Freed device memory that the pool keeps for later allocations. The rest returns to the driver at the next
/// synchronisation, so that others can use it.
constexpr std::uint64_t pool_keeps_bytes = std::uint64_t{64} << 20;

cudaStream_t stream_of(void* handle) {
    return static_cast<cudaStream_t>(handle);
}
cudaEvent_t event_of(void* handle) {
    return static_cast<cudaEvent_t>(handle);
}

bool is_empty(const row_transfer& transfer) noexcept {
    return transfer.begin == transfer.end || transfer.table.row_size_bytes == 0;
}

class backend final : public device_backend {
 public:
    explicit backend(int device) : context_(device), pinned_(device), host_functions_(context_, pinned_) {
        cudaDeviceProp properties{};
        check(device_properties(properties, device), "cannot read the properties of cuda:{}", device);
        model_ = properties.name;
        multiprocessors_ = static_cast<unsigned>(properties.multiProcessorCount);
        int architecture = 0;  // of all kernels
        const cudaError_t loaded = context_.run([&] { return load_kernel(digest_samples(), &architecture); });
        if (loaded == cudaErrorNoKernelImageForDevice || loaded == cudaErrorInvalidDeviceFunction) {
            check(loaded, "cannot use cuda:{} ({}): this build has no code for its compute capability {}.{}",
                  device, model_, properties.major, properties.minor);
        }
        check(loaded, "cannot load kernels on cuda:{} ({})", device, model_);
        check(context_.run([&] { return create_pool(pool_, device, pool_keeps_bytes); }),
              "cannot create a memory pool on cuda:{}", device);
        row_kernels_.emplace(multiprocessors_);
        flat_device_ = {multiprocessors_, architecture >= 90};
    }

    device_kind kind() const noexcept override { return device_kind::cuda; }
    int index() const noexcept override { return context_.device(); }
    std::string model() const override { return model_; }

    device::memory_sizes memory() const override {
        std::size_t free_bytes = 0;
        std::size_t total_bytes = 0;
        check(context_.run([&] { return memory_info(free_bytes, total_bytes); }),
              "cannot read the memory sizes of cuda:{}", index());
        return {total_bytes, free_bytes};
    }

    // ---- streams and events ---------------------------------------------------------------------

    void* create_stream() override {
        cudaStream_t stream = nullptr;
        check(context_.run([&] { return cuda::create_stream(stream); }), "cannot create a stream on cuda:{}",
              index());
        return stream;
    }

    void finish_stream(void* stream) noexcept override {
        static_cast<void>(context_.run([&] { return cuda::synchronize_stream(stream_of(stream)); }));
    }

    void destroy_stream(void* stream) noexcept override {
        static_cast<void>(context_.run([&] { return cuda::destroy_stream(stream_of(stream)); }));
    }

    void synchronize_stream(void* stream) override {
        check(context_.run([&] { return cuda::synchronize_stream(stream_of(stream)); }),
              "cannot finish the work of a stream on cuda:{}", index());
    }

    bool stream_done(void* stream) override {
        return passed(context_.run([&] { return query_stream(stream_of(stream)); }), "a stream");
    }

    void* stream_for_marks(void* stream) noexcept override {
        // per-thread default streams are blocking: what is recorded in the legacy stream comes after all of
        // them
        return stream == cudaStreamPerThread ? static_cast<void*>(cudaStreamLegacy) : stream;
    }
    bool is_capturing(void* stream) override {
        bool answer = false;
        check(context_.run([&] { return cuda::is_capturing(answer, stream_of(stream)); }),
              "cannot tell whether a stream of cuda:{} is being captured", index());
        return answer;
    }

    void enqueue_host_function(void* stream, std::function<void()> work) override {
        check(host_functions_.enqueue(std::move(work), stream_of(stream)),
              "cannot enqueue a host function on cuda:{}", index());
    }

    void* create_event() override {
        cudaEvent_t event = nullptr;
        check(context_.run([&] { return cuda::create_event(event); }), "cannot create an event on cuda:{}",
              index());
        return event;
    }

    void destroy_event(void* event) noexcept override {
        static_cast<void>(context_.run([&] { return cuda::destroy_event(event_of(event)); }));
    }

    void record_event(void* event, void* stream) override {
        check(context_.run([&] { return cuda::record_event(event_of(event), stream_of(stream)); }),
              "cannot record an event on cuda:{}", index());
    }

    void stream_wait_event(void* stream, void* event) override {
        check(context_.run([&] { return cuda::stream_wait_event(stream_of(stream), event_of(event)); }),
              "cannot make a stream of cuda:{} wait", index());
    }

    /// Polls instead of using cudaEventSynchronize, which has no timeout and either occupies a core or wakes
    /// up late. It spins for the first 20 us, because small copies often end that soon. After that it sleeps
    /// between polls, which may add a tenth of a millisecond. Frequent polls delay the threads that enqueue:
    /// with them, batches of 4 KiB rows arrived 2 to 3 % slower at a consumer that only took them.
    bool synchronize_event_for(void* event, std::chrono::microseconds timeout) override {
        constexpr std::chrono::microseconds spinning{20};
        constexpr std::chrono::microseconds pause{60};
        const auto start = std::chrono::steady_clock::now();
        cudaError_t status = cudaSuccess;
        const cudaError_t outcome = context_.run([&] {
            for (;;) {
                status = query_event(event_of(event));
                if (status != cudaErrorNotReady) return status;
                const auto waited = std::chrono::steady_clock::now() - start;
                if (waited >= timeout) return status;
                if (waited >= spinning) std::this_thread::sleep_for(pause);
            }
        });
        return passed(outcome, "an event");
    }

    void synchronize_event(void* event) override {
        while (!synchronize_event_for(event, std::chrono::seconds(1))) {
        }
    }

    bool event_done(void* event) override {
        return passed(context_.run([&] { return query_event(event_of(event)); }), "an event");
    }

    // ---- memory ---------------------------------------------------------------------------------

    std::byte* allocate(std::uint64_t size_bytes, void* stream) override {
        void* data = nullptr;
        const cudaError_t status =
            context_.run([&] { return cuda::allocate(data, size_bytes, pool_, stream_of(stream)); });
        if (status == cudaErrorMemoryAllocation) {
            fail(fmt::format("cannot allocate {} bytes on cuda:{}, which has {} of free memory", size_bytes,
                             index(), in_binary_units(memory().free_bytes)),
                 status);
        }
        check(status, "cannot allocate {} bytes on cuda:{}", size_bytes, index());
        return static_cast<std::byte*>(data);
    }

    void release(std::byte* data, std::uint64_t, void* stream,
                 std::span<const event> events) noexcept override {
        static_cast<void>(context_.run([&] {
            for (const event& event : events) {
                if (event.native_handle() == nullptr) continue;
                // memory that may still be in use is leaked rather than reused
                const cudaError_t status =
                    cuda::stream_wait_event(stream_of(stream), event_of(event.native_handle()));
                if (status != cudaSuccess) return status;
            }
            return cuda::free(data, stream_of(stream));
        }));
    }

    std::byte* allocate_pinned(std::uint64_t size_bytes) override { return pinned_.allocate(size_bytes); }

    void release_pinned(std::byte* data, std::uint64_t) noexcept override { pinned_.release(data); }

    // ---- copies ---------------------------------------------------------------------------------

    void copy_to_device(std::byte* destination, std::span<const std::byte> source, void* stream) override {
        const copy_range range{destination, source.data(), source.size()};
        std::vector<copy_range> pieces;
        pin_registry::process().cut({&range, 1}, pieces);
        check(context_.run([&] {
            for (const copy_range& piece : pieces) {
                const cudaError_t status = cuda::copy(piece.destination, piece.source, piece.size_bytes,
                                                      cudaMemcpyHostToDevice, stream_of(stream));
                if (status != cudaSuccess) return status;
            }
            return cudaSuccess;
        }),
              "cannot copy {} bytes to cuda:{}", source.size(), index());
    }

    void copy_to_host(std::span<std::byte> destination, const std::byte* source, void* stream) override {
        if (destination.empty()) return;
        // cut at the edges of registered pages on the host's side, like copies to the device
        const copy_range range{const_cast<std::byte*>(source), destination.data(), destination.size()};
        std::vector<copy_range> pieces;
        pin_registry::process().cut({&range, 1}, pieces);
        check(context_.run([&] {
            for (const copy_range& piece : pieces) {
                const cudaError_t status =
                    cuda::copy(const_cast<std::byte*>(piece.source), piece.destination, piece.size_bytes,
                               cudaMemcpyDeviceToHost, stream_of(stream));
                if (status != cudaSuccess) return status;
            }
            return cudaSuccess;
        }),
              "cannot copy {} bytes from cuda:{} to the host", destination.size(), index());
    }

    void copy_batch_to_device(std::span<const copy_range> ranges, void* stream) override {
        std::vector<copy_range> pieces;
        pin_registry::process().cut(ranges, pieces);
        copy_list copies(pieces.size());
        for (const copy_range& piece : pieces)
            copies.add(piece.destination, piece.source, piece.size_bytes);
        check(context_.run([&] { return copies.enqueue(cudaMemcpyHostToDevice, stream_of(stream)); }),
              "cannot copy a batch of {} ranges to cuda:{}", ranges.size(), index());
    }

    void copy_strided_to_device(const strided_copy& runs, void* stream) override {
        if (runs.size_bytes() == 0) return;
        check(context_.run([&] {
            return cuda::copy_strided(runs.destination, runs.source, runs.run_bytes, runs.stride_bytes,
                                      runs.run_count, stream_of(stream));
        }),
              "cannot copy {} runs of {} bytes to cuda:{}", runs.run_count, runs.run_bytes, index());
    }

    void convert_to_device(const device_conversion& work, void* stream) override {
        if (work.count == 0) return;
        device_conversion copy = work;
        void* arguments[] = {&copy};
        const std::uint64_t packs = work.count * size_bytes_of(work.from) / cuda::conversion_pack_bytes;
        // more blocks only wait for the link
        const unsigned blocks =
            blocks_for(packs, cuda::conversion_threads, std::uint64_t{multiprocessors_} * 8);
        check(context_.run([&] {
            return launch(cuda::conversion_kernel(work.from, work.to), blocks, cuda::conversion_threads,
                          arguments, stream_of(stream));
        }),
              "cannot swap, scatter or cast {} elements of {} bytes to elements of {} bytes on cuda:{}",
              work.count, size_bytes_of(work.from), size_bytes_of(work.to), index());
    }

    void copy_batch_to_host(std::span<const host_copy_range> ranges, void* stream) override {
        // cut at the boundaries between registrations of the host's side, like copies to the device
        std::vector<copy_range> to_cut;
        to_cut.reserve(ranges.size());
        for (const host_copy_range& range : ranges)
            to_cut.push_back({const_cast<std::byte*>(range.source), range.destination, range.size_bytes});
        std::vector<copy_range> pieces;
        pin_registry::process().cut(to_cut, pieces);
        copy_list copies(pieces.size());
        for (const copy_range& piece : pieces)
            copies.add(const_cast<std::byte*>(piece.source), piece.destination, piece.size_bytes);
        check(context_.run([&] { return copies.enqueue(cudaMemcpyDeviceToHost, stream_of(stream)); }),
              "cannot copy a batch of {} ranges from cuda:{}", ranges.size(), index());
    }

    void copy_on_device(std::byte* destination, const std::byte* source, std::uint64_t size_bytes,
                        void* stream) override {
        if (size_bytes == 0) return;
        check(context_.run([&] {
            return cuda::copy(destination, source, size_bytes, cudaMemcpyDeviceToDevice, stream_of(stream));
        }),
              "cannot copy {} bytes within cuda:{}", size_bytes, index());
    }

    void fill_zero(std::byte* data, std::uint64_t size_bytes, void* stream) override {
        if (size_bytes == 0) return;
        check(context_.run([&] { return cuda::fill_zero(data, size_bytes, stream_of(stream)); }),
              "cannot clear {} bytes of cuda:{}", size_bytes, index());
    }

    page_locker* locker() override { return &cuda_page_locker(index()); }

    bool reaches(const std::byte* data, std::uint64_t size_bytes) override {
        const auto known = [&] { return pin_registry::process().knows({data, size_bytes}); };
        if (size_bytes == 0) return true;
        if (known()) return false;
        const std::byte* const end = data + size_bytes;
        for (const std::byte* at = data; at < end; at = end_of_reached(at)) {
            cudaPointerAttributes attributes{};
            const cudaError_t status = context_.run([&] { return pointer_attributes(attributes, at); });
            const bool is_reached = status == cudaSuccess && attributes.type == cudaMemoryTypeHost &&
                                    attributes.devicePointer == at;
            if (!is_reached) return false;
        }
        return !known();  // and not registered by pinflow meanwhile
    }

    // ---- rows by index --------------------------------------------------------------------------

    void prepare_rows() override {
        host_functions_.reserve();  // calls on the staged and hybrid routes enqueue host functions
        const std::lock_guard lock(rows_mutex_);
        if (rows_loaded_) return;
        void* const stream = create_stream();
        const cudaError_t status = context_.run([&] { return row_kernels_->load(pool_, stream_of(stream)); });
        destroy_stream(stream);
        check(status, "cannot load the kernels for rows on cuda:{}", index());
        rows_loaded_ = true;
    }

    void check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                    const error_memory& errors, void* stream) override {
        check(context_.run(
                  [&] { return row_kernels_->check_rows(ids, count, row_count, errors, stream_of(stream)); }),
              "cannot check {} indices on cuda:{}", count, index());
    }

    std::uint64_t sort_scratch_bytes(std::uint64_t count, std::uint64_t row_count,
                                     sort_kernels kernels) override {
        std::uint64_t size_bytes = 0;
        check(context_.run(
                  [&] { return row_kernels::sort_scratch_bytes(size_bytes, count, row_count, kernels); }),
              "cannot prepare to sort {} indices on cuda:{}", count, index());
        return size_bytes;
    }

    void sort_rows(const row_sort& sort, void* stream) override {
        if (sort.count == 0) return;
        check(context_.run([&] { return row_kernels_->sort_rows(sort, stream_of(stream)); }),
              "cannot sort {} indices on cuda:{}", sort.count, index());
    }

    void refuse_repeated_rows(const row_order& order, const std::uint64_t* ids, const error_memory& errors,
                              void* stream) override {
        check(context_.run(
                  [&] { return row_kernels_->refuse_repeated_rows(order, ids, errors, stream_of(stream)); }),
              "cannot check {} indices on cuda:{}", order.count, index());
    }

    void gather_rows(const row_transfer& transfer, void* stream) override {
        if (is_empty(transfer)) return;
        check(context_.run([&] { return row_kernels_->gather_rows(transfer, stream_of(stream)); }),
              "cannot gather {} rows of {} bytes to cuda:{}", transfer.end - transfer.begin,
              transfer.table.row_size_bytes, index());
    }

    void gather_held(const held_gather& gather, void* stream) override {
        if (gather.count == 0 || gather.table_count == 0) return;
        check(context_.run([&] { return row_kernels_->gather_held(gather, stream_of(stream)); }),
              "cannot gather {} held rows on cuda:{}", gather.count, index());
    }

    void repeat_rows(const row_transfer& transfer, void* stream) override {
        if (is_empty(transfer) || !transfer.order.sorted) return;
        check(context_.run([&] { return row_kernels_->repeat_rows(transfer, stream_of(stream)); }),
              "cannot repeat rows of {} bytes on cuda:{}", transfer.table.row_size_bytes, index());
    }

    void scatter_rows(const row_transfer& transfer, repeated_rows repeated, sum_type type,
                      void* stream) override {
        if (is_empty(transfer)) return;
        check(context_.run(
                  [&] { return row_kernels_->scatter_rows(transfer, repeated, type, stream_of(stream)); }),
              "cannot scatter {} rows of {} bytes from cuda:{}", transfer.end - transfer.begin,
              transfer.table.row_size_bytes, index());
    }

    // ---- flat parameters ------------------------------------------------------------------------

    void prepare_updates(rule_kind rule) override {
        check(context_.run([&] { return load_updates(rule); }),
              "cannot load the kernels of an optimizer on cuda:{}", index());
    }
    void check_gradients(const gradient_check& work, void* stream) override {
        check(context_.run([&] { return cuda::check_gradients(work, flat_device_, stream_of(stream)); }),
              "cannot check gradients on cuda:{}", index());
    }
    void update_parameters(const flat_step& work, void* stream) override {
        check(context_.run([&] { return cuda::update_parameters(work, flat_device_, stream_of(stream)); }),
              "cannot update parameters on cuda:{}", index());
    }
    void set_number(double* destination, double value, void* stream) override {
        check(context_.run([&] { return set_number_of(destination, value, stream_of(stream)); }),
              "cannot set a rate on cuda:{}", index());
    }

    // ---- records of embedding tables ------------------------------------------------------------

    void prepare_records(rule_kind rule) override {
        check(context_.run([&] { return load_records(rule); }),
              "cannot load the kernels of an embedding table on cuda:{}", index());
    }
    void group_rows(const row_grouping& grouping, void* stream) override {
        if (grouping.sorted.count == 0) return;
        check(context_.run([&] { return cuda::group_rows(grouping, stream_of(stream)); }),
              "cannot group {} indices on cuda:{}", grouping.sorted.count, index());
    }
    void patch_records(const record_patch& work, void* stream) override {
        check(context_.run([&] { return cuda::patch_records(work, multiprocessors_, stream_of(stream)); }),
              "cannot copy records of {} rows on cuda:{}", work.rows.max_count, index());
    }
    void update_records(const record_update& work, void* stream) override {
        check(context_.run([&] { return cuda::update_records(work, multiprocessors_, stream_of(stream)); }),
              "cannot update records of {} rows on cuda:{}", work.rows.max_count, index());
    }

    // ---- the digest -----------------------------------------------------------------------------

    void add_digest(std::span<const digest_array> arrays, std::uint64_t row_count, std::uint64_t* sum,
                    void* stream) override {
        if (row_count == 0) return;
        const digest_device device{multiprocessors_, pool_};
        check(
            context_.run([&] { return cuda::add_digest(arrays, row_count, sum, device, stream_of(stream)); }),
            "cannot compute the digest of {} samples on cuda:{}", row_count, index());
    }

 private:
    /// The end of the allocation or registration that contains `data`, or of its page if CUDA knows none.
    const std::byte* end_of_reached(const std::byte* data) const {
        constexpr std::uintptr_t page_bytes = 4096;
        std::span<const std::byte> range;
        const cudaError_t status = context_.run([&] { return pointer_range(range, data); });
        const std::byte* const end = std::to_address(range.end());
        if (status == cudaSuccess && range.data() <= data && data < end) return end;
        return data + (page_bytes - reinterpret_cast<std::uintptr_t>(data) % page_bytes);
    }

    bool passed(cudaError_t status, const char* what) const {
        if (status == cudaErrorNotReady) return false;
        check(status, "cannot query {} of cuda:{}", what, index());
        return true;
    }

    context context_;
    pinned_memory pinned_;
    host_functions host_functions_;
    std::string model_;
    unsigned multiprocessors_ = 1;
    flat_device flat_device_;
    cudaMemPool_t pool_ = nullptr;
    std::optional<row_kernels> row_kernels_;
    std::mutex rows_mutex_;
    bool rows_loaded_ = false;
};

}  // namespace
}  // namespace cuda

device_backend& cuda_backend(int index) {
    // never destroyed: buffers and streams may live in static objects
    static std::mutex& mutex = *new std::mutex;
    static auto& backends = *new std::map<int, std::unique_ptr<cuda::backend>>;
    const std::lock_guard lock(mutex);
    if (const auto found = backends.find(index); found != backends.end()) return *found->second;
    std::string reason;
    const int count = cuda_device_count(&reason);
    if (count == 0) throw device_error(fmt::format("cannot use the device cuda:{}: {}", index, reason));
    if (index < 0 || index >= count) {
        throw device_error(
            fmt::format("cannot use the device cuda:{}: the machine has {} CUDA device{}, counted from 0",
                        index, count, count == 1 ? "" : "s"));
    }
    return *backends.emplace(index, std::make_unique<cuda::backend>(index)).first->second;
}

int cuda_device_count(std::string* none_reason) noexcept {
    int count = 0;
    int capability = 0;
    cudaError_t status = cuda::device_count(count);
    if (status == cudaSuccess && count > 0) {
        status = cuda::device_attribute(capability, cudaDevAttrComputeCapabilityMajor, 0);
    }
    const bool usable = status == cudaSuccess && count > 0 && capability >= cuda::min_capability;
    if (usable) return count;
    if (none_reason != nullptr) {
        try {
            if (status != cudaSuccess) {
                *none_reason = cuda::cause(status);
            } else if (count == 0) {
                *none_reason = "the machine has no CUDA device";
            } else {
                *none_reason = fmt::format(
                    "cuda:0 has compute capability {}.x; {}.0 is the oldest that pinflow supports",
                    capability, cuda::min_capability);
            }
        } catch (const std::exception&) {
            none_reason->clear();
        }
    }
    return 0;
}

}  // namespace pinflow::detail
