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

/// The one layer that calls CUDA. Every call returns its status, which `check` turns into a sentence. Each
/// passes a seam where tests inject faults, is refused in a forked child, and is refused for good after a
/// sticky error. No call leaves a status of ours behind for the program's own cudaGetLastError. All functions
/// may be called from any thread.
namespace pinflow::detail::cuda {

// ---- the seam -----------------------------------------------------------------------------------

/// Asked before each call, by the name of CUDA's function ("cudaHostRegister"); cudaSuccess lets it happen,
/// any other status is what the call then fails with. May be called from several threads at once.
using failure_hook = std::function<cudaError_t(std::string_view call)>;

/// Installs a hook for its lifetime; a sticky error that it injected is forgotten at the end. For tests. Of
/// several, the last is asked first. If it lets the call happen, the others are asked.
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
/// "cudaErrorInvalidValue (invalid argument)", with what is known about the reason; the end of a sentence.
std::string cause(cudaError_t status);
/// @throws fatal_device_error after a sticky error, otherwise device_error.
[[noreturn]] void fail(std::string_view attempt, cudaError_t status);
/// Throws a sentence that begins with the formatted attempt unless `status` is cudaSuccess.
template <typename... Arguments>
void check(cudaError_t status, fmt::format_string<Arguments...> attempt, Arguments&&... arguments) {
    if (status != cudaSuccess) fail(fmt::format(attempt, std::forward<Arguments>(arguments)...), status);
}

// ---- devices and contexts -----------------------------------------------------------------------

[[nodiscard]] cudaError_t device_count(int& count) noexcept;
[[nodiscard]] cudaError_t device_attribute(int& value, cudaDeviceAttr attribute, int device) noexcept;
[[nodiscard]] cudaError_t device_properties(cudaDeviceProp& properties, int device) noexcept;
[[nodiscard]] cudaError_t memory_info(std::size_t& free_bytes, std::size_t& total_bytes) noexcept;
/// Whether this build has code for the current device in `kernel`.
[[nodiscard]] cudaError_t kernel_runs(const void* kernel) noexcept;
/// The device's primary context, the one that the runtime and all frameworks use; kept alive for the process.
[[nodiscard]] cudaError_t retain_primary_context(CUcontext& context, int device) noexcept;
/// Another context of the device, which is not made current. It lives as long as the process.
[[nodiscard]] cudaError_t create_context(CUcontext& context, int device) noexcept;
[[nodiscard]] cudaError_t current_context(CUcontext& context) noexcept;
[[nodiscard]] cudaError_t push_context(CUcontext context) noexcept;
[[nodiscard]] cudaError_t pop_context() noexcept;

// ---- streams and events -------------------------------------------------------------------------

/// Whether `stream` is the legacy default stream, which some calls do not take.
bool is_legacy_stream(cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t create_stream(cudaStream_t& stream) noexcept;
[[nodiscard]] cudaError_t destroy_stream(cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t synchronize_stream(cudaStream_t stream) noexcept;
/// cudaSuccess when all is done, cudaErrorNotReady when not.
[[nodiscard]] cudaError_t query_stream(cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t launch_host_function(cudaStream_t stream, cudaHostFn_t function,
                                               void* data) noexcept;
/// Work enqueued from now on waits until *word has counted up to `value`; `word` is pinned host memory.
[[nodiscard]] cudaError_t stream_wait_value(cudaStream_t stream, const std::uint32_t* word,
                                            std::uint32_t value) noexcept;
[[nodiscard]] cudaError_t create_event(cudaEvent_t& event) noexcept;
[[nodiscard]] cudaError_t destroy_event(cudaEvent_t event) noexcept;
[[nodiscard]] cudaError_t record_event(cudaEvent_t event, cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t stream_wait_event(cudaStream_t stream, cudaEvent_t event) noexcept;
[[nodiscard]] cudaError_t query_event(cudaEvent_t event) noexcept;

// ---- memory -------------------------------------------------------------------------------------

/// A pool of device memory that keeps up to `keep_bytes` of what was freed.
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
/// What kind of memory lies at `data`; cudaMemoryTypeUnregistered for host memory that CUDA does not know.
[[nodiscard]] cudaError_t pointer_attributes(cudaPointerAttributes& attributes, const void* data) noexcept;
/// One call for many copies between the host and the device; the three lists are of the same length, at least
/// 1, and no size is 0. Not for the legacy default stream.
[[nodiscard]] cudaError_t copy_batch(std::span<void*> destinations, std::span<const void*> sources,
                                     std::span<std::size_t> sizes, cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t fill_zero(void* data, std::size_t size_bytes, cudaStream_t stream) noexcept;

// ---- kernels ------------------------------------------------------------------------------------

[[nodiscard]] cudaError_t launch(const void* kernel, dim3 blocks, unsigned threads, void** arguments,
                                 cudaStream_t stream) noexcept;
/// Whether the device has clusters, of which two blocks of this kernel make one. Loads the kernel.
[[nodiscard]] bool runs_in_pairs(const void* kernel, unsigned threads) noexcept;
/// For those: an even number of blocks in clusters of two, which lie on neighbouring multiprocessors.
[[nodiscard]] cudaError_t launch_pairs(const void* kernel, unsigned blocks, unsigned threads,
                                       void** arguments, cudaStream_t stream) noexcept;
/// Sorts indices, as sort_pairs of sort_rows.hpp does.
[[nodiscard]] cudaError_t sort_ids(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* ids,
                                   std::uint64_t* sorted_ids, const std::uint32_t* positions,
                                   std::uint32_t* sorted_positions, std::uint64_t count, int bits,
                                   cudaStream_t stream) noexcept;

}  // namespace pinflow::detail::cuda
