#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "src/core/hooks.hpp"

/// The only layer that calls CUDA. Every call returns its status, except `runs_in_pairs`, which returns false
/// on failure. `check` turns a failure into an exception. Every call passes a seam where tests inject
/// failures, and is refused in a forked child and after a sticky error. The exceptions are `pop_context` and
/// `exchange_capture_mode`, which are always made. No failure of these calls remains visible to the program's
/// own cudaGetLastError. Any thread may call these functions.
namespace pinflow::detail::cuda {

// ---- the seam -----------------------------------------------------------------------------------

/// Called before each CUDA call, with the name of the CUDA function ("cudaHostRegister"). If it returns
/// cudaSuccess, the call is made; otherwise the call fails with the returned status. May be called from
/// several threads at once.
using failure_hook = std::function<cudaError_t(std::string_view call)>;

/// Installs a hook for its lifetime. For tests. Its end clears any sticky error, injected or not. The hook
/// installed last is called first; if it returns cudaSuccess, the others are called.
class scoped_failure_hook {
 public:
    explicit scoped_failure_hook(failure_hook hook);
    ~scoped_failure_hook();
    scoped_failure_hook(const scoped_failure_hook&) = delete;
    scoped_failure_hook& operator=(const scoped_failure_hook&) = delete;

 private:
    hooks<failure_hook>::scope scope_;
};

// ---- errors -------------------------------------------------------------------------------------

/// Whether no later call in this process can succeed after `status` (CUDA calls such errors sticky).
bool is_fatal(cudaError_t status) noexcept;
/// The end of a message, such as "cudaErrorInvalidValue (invalid argument)", with the reason if it is known.
std::string cause(cudaError_t status);
/// @throws fatal_device_error after a sticky error, otherwise device_error.
[[noreturn]] void fail(std::string_view attempt, cudaError_t status);
/// Throws, as `fail`, unless `status` is cudaSuccess. The message begins with the formatted attempt.
template <typename... Arguments>
void check(cudaError_t status, fmt::format_string<Arguments...> attempt, Arguments&&... arguments) {
    if (status != cudaSuccess) fail(fmt::format(attempt, std::forward<Arguments>(arguments)...), status);
}

// ---- devices and contexts -----------------------------------------------------------------------

[[nodiscard]] cudaError_t device_count(int& count) noexcept;
[[nodiscard]] cudaError_t device_attribute(int& value, cudaDeviceAttr attribute, int device) noexcept;
[[nodiscard]] cudaError_t device_properties(cudaDeviceProp& properties, int device) noexcept;
[[nodiscard]] cudaError_t memory_info(std::size_t& free_bytes, std::size_t& total_bytes) noexcept;
/// Loads `kernel` on the current device. Sets `architecture` to the compute capability that its code was
/// compiled for, times 10; that of the device may be higher.
/// @return cudaErrorNoKernelImageForDevice or cudaErrorInvalidDeviceFunction if this build has no code for
/// the device.
[[nodiscard]] cudaError_t load_kernel(const void* kernel, int* architecture = nullptr) noexcept;
/// Retains the device's primary context, which the runtime and all frameworks use, until the process ends.
[[nodiscard]] cudaError_t retain_primary_context(CUcontext& context, int device) noexcept;
/// Creates another context of the device without making it current. It lives as long as the process.
[[nodiscard]] cudaError_t create_context(CUcontext& context, int device) noexcept;
[[nodiscard]] cudaError_t current_context(CUcontext& context) noexcept;
[[nodiscard]] cudaError_t push_context(CUcontext context) noexcept;
[[nodiscard]] cudaError_t pop_context() noexcept;
/// Sets the calling thread's mode of stream capture, and returns the previous one in `mode`.
void exchange_capture_mode(CUstreamCaptureMode& mode) noexcept;

// ---- streams and events -------------------------------------------------------------------------

/// Whether `stream` is the legacy default stream, which some calls do not accept.
bool is_legacy_stream(cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t create_stream(cudaStream_t& stream) noexcept;
[[nodiscard]] cudaError_t destroy_stream(cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t synchronize_stream(cudaStream_t stream) noexcept;
/// @return cudaSuccess if all enqueued work is done, cudaErrorNotReady if it is not.
[[nodiscard]] cudaError_t query_stream(cudaStream_t stream) noexcept;
/// Whether the stream is being captured into a graph. The legacy default stream counts as captured while any
/// stream that it would wait for is being captured.
[[nodiscard]] cudaError_t is_capturing(bool& answer, cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t launch_host_function(cudaStream_t stream, cudaHostFn_t function,
                                               void* data) noexcept;
/// Makes work enqueued from now on wait until *word is at least `value`. `word` is in pinned host memory.
[[nodiscard]] cudaError_t stream_wait_value(cudaStream_t stream, const std::uint32_t* word,
                                            std::uint32_t value) noexcept;
[[nodiscard]] cudaError_t create_event(cudaEvent_t& event) noexcept;
[[nodiscard]] cudaError_t destroy_event(cudaEvent_t event) noexcept;
[[nodiscard]] cudaError_t record_event(cudaEvent_t event, cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t stream_wait_event(cudaStream_t stream, cudaEvent_t event) noexcept;
[[nodiscard]] cudaError_t query_event(cudaEvent_t event) noexcept;

// ---- memory -------------------------------------------------------------------------------------

/// Creates a pool of device memory that keeps up to `keep_bytes` of freed memory.
[[nodiscard]] cudaError_t create_pool(cudaMemPool_t& pool, int device, std::uint64_t keep_bytes) noexcept;
[[nodiscard]] cudaError_t allocate(void*& data, std::size_t size_bytes, cudaMemPool_t pool,
                                   cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t free(void* data, cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t host_allocate(void*& data, std::size_t size_bytes) noexcept;
[[nodiscard]] cudaError_t host_free(void* data) noexcept;
[[nodiscard]] cudaError_t host_register(void* data, std::size_t size_bytes, bool read_only) noexcept;
[[nodiscard]] cudaError_t host_unregister(void* data) noexcept;
[[nodiscard]] cudaError_t host_device_pointer(void*& device_pointer, void* data) noexcept;
[[nodiscard]] cudaError_t copy(void* destination, const void* source, std::size_t size_bytes,
                               cudaMemcpyKind kind, cudaStream_t stream) noexcept;
/// Copies `count` runs of `run_bytes`, `stride_bytes` apart in host memory, to contiguous device memory.
[[nodiscard]] cudaError_t copy_strided(void* destination, const void* source, std::size_t run_bytes,
                                       std::size_t stride_bytes, std::size_t count,
                                       cudaStream_t stream) noexcept;
/// Tells the kind of memory at `data`: cudaMemoryTypeUnregistered for host memory that CUDA does not know.
[[nodiscard]] cudaError_t pointer_attributes(cudaPointerAttributes& attributes, const void* data) noexcept;
/// The allocation or registration that `data` is in.
[[nodiscard]] cudaError_t pointer_range(std::span<const std::byte>& range, const void* data) noexcept;
/// Makes many copies between the host and the device with one call. The three lists have the same length, at
/// least 1, and no size is 0. The legacy default stream is not allowed.
[[nodiscard]] cudaError_t copy_batch(std::span<void*> destinations, std::span<const void*> sources,
                                     std::span<std::size_t> sizes, cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t fill_zero(void* data, std::size_t size_bytes, cudaStream_t stream) noexcept;

// ---- kernels ------------------------------------------------------------------------------------

[[nodiscard]] cudaError_t launch(const void* kernel, dim3 blocks, unsigned threads, void** arguments,
                                 cudaStream_t stream) noexcept;
/// The same, but blocks may start while the previous kernel in the stream still runs, if that kernel allows
/// it: programmatic dependent launch. Requires a kernel compiled for compute capability 9.0 or higher, which
/// waits by itself.
[[nodiscard]] cudaError_t launch_early(const void* kernel, dim3 blocks, unsigned threads, void** arguments,
                                       cudaStream_t stream) noexcept;
/// Whether the device can run this kernel in clusters of two blocks. Loads the kernel.
[[nodiscard]] bool runs_in_pairs(const void* kernel, unsigned threads) noexcept;
/// Launches an even number of blocks in clusters of two, each on one GPC. Requires `runs_in_pairs`.
[[nodiscard]] cudaError_t launch_pairs(const void* kernel, unsigned blocks, unsigned threads,
                                       void** arguments, cudaStream_t stream) noexcept;
/// The number of blocks of this kernel that a multiprocessor can run at a time. Loads the kernel.
[[nodiscard]] cudaError_t resident_blocks(int& blocks, const void* kernel, unsigned threads) noexcept;
/// Launches blocks that may wait for each other. All of them must be resident at a time.
[[nodiscard]] cudaError_t launch_together(const void* kernel, unsigned blocks, unsigned threads,
                                          void** arguments, cudaStream_t stream) noexcept;
/// Sorts indices like sort_pairs of sort_rows.hpp.
[[nodiscard]] cudaError_t sort_ids(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* ids,
                                   std::uint64_t* sorted_ids, const std::uint32_t* positions,
                                   std::uint32_t* sorted_positions, std::uint64_t count, int bits,
                                   cudaStream_t stream) noexcept;

}  // namespace pinflow::detail::cuda
