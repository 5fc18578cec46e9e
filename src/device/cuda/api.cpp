#include "src/device/cuda/api.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "pinflow/error.hpp"
#include "src/device/cuda/sort_rows.hpp"

namespace pinflow::detail::cuda {

namespace {

hooks<failure_hook> installed_hooks;

/// The process that called CUDA first; CUDA does not survive fork.
std::atomic<::pid_t> owner_process = 0;
/// The first sticky error; from then on only `pop_context` reaches CUDA.
std::atomic<cudaError_t> first_fatal = cudaSuccess;

bool forked() noexcept {
    const ::pid_t here = ::getpid();
    ::pid_t owner = 0;
    return !owner_process.compare_exchange_strong(owner, here) && owner != here;
}

cudaError_t ask_hook(std::string_view call) noexcept {
    cudaError_t status = cudaSuccess;
    installed_hooks.ask([&](const failure_hook& hook) {
        status = hook(call);
        return status != cudaSuccess;
    });
    return status;
}

void remember_if_fatal(cudaError_t status) noexcept {
    cudaError_t none = cudaSuccess;
    if (is_fatal(status)) first_fatal.compare_exchange_strong(none, status);
}

/// Makes one call, unless it is refused or a test makes it fail.
template <typename Function>
cudaError_t attempt(std::string_view call, Function function) noexcept {
    if (forked()) return cudaErrorInitializationError;
    if (const cudaError_t fatal = first_fatal.load(std::memory_order_relaxed); fatal != cudaSuccess)
        return fatal;
    cudaError_t status = ask_hook(call);
    if (status == cudaSuccess) {
        status = function();
        // our failure is reported here; the program's own cudaGetLastError must not find it
        if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
    }
    if (status != cudaSuccess) remember_if_fatal(status);
    return status;
}

/// The configuration of a launch in clusters of two blocks.
struct paired_launch {
    paired_launch(unsigned blocks, unsigned threads, cudaStream_t stream) noexcept {
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = 2;
        cluster.val.clusterDim.y = 1;
        cluster.val.clusterDim.z = 1;
        config.gridDim = dim3(blocks);
        config.blockDim = dim3(threads);
        config.stream = stream;
        config.attrs = &cluster;
        config.numAttrs = 1;
    }
    paired_launch(const paired_launch&) = delete;
    paired_launch& operator=(const paired_launch&) = delete;

    cudaLaunchAttribute cluster{};
    cudaLaunchConfig_t config{};
};

/// Driver functions without a counterpart in the runtime. They are looked up by name: a program linked with
/// libcuda would not start on a machine without a driver.
struct driver_functions {
    cudaError_t status = cudaSuccess;
    CUresult(CUDAAPI* retain_primary)(CUcontext*, CUdevice) = nullptr;
    CUresult(CUDAAPI* create_context)(CUcontext*, unsigned, CUdevice) = nullptr;
    CUresult(CUDAAPI* get_current)(CUcontext*) = nullptr;
    CUresult(CUDAAPI* push_current)(CUcontext) = nullptr;
    CUresult(CUDAAPI* pop_current)(CUcontext*) = nullptr;
    CUresult(CUDAAPI* exchange_capture_mode)(CUstreamCaptureMode*) = nullptr;
    CUresult(CUDAAPI* pointer_attribute)(void*, CUpointer_attribute, CUdeviceptr) = nullptr;
    CUresult(CUDAAPI* wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned) = nullptr;

    driver_functions() noexcept {
        find("cuDevicePrimaryCtxRetain", retain_primary);
        find("cuCtxCreate", create_context, 3020);  // later versions have other parameters
        find("cuCtxGetCurrent", get_current);
        find("cuCtxPushCurrent", push_current);
        find("cuCtxPopCurrent", pop_current);
        find("cuThreadExchangeStreamCaptureMode", exchange_capture_mode);
        find("cuPointerGetAttribute", pointer_attribute);
        find("cuStreamWaitValue32", wait_value);
    }

    template <typename Function>
    void find(const char* name, Function& function, unsigned signatures_of = 12000) noexcept {
        if (status != cudaSuccess) return;
        void* address = nullptr;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        status = cudaGetDriverEntryPointByVersion(name, &address, signatures_of, cudaEnableDefault, &result);
        if (status == cudaSuccess && result != cudaDriverEntryPointSuccess) status = cudaErrorSymbolNotFound;
        if (status == cudaSuccess) function = reinterpret_cast<Function>(address);
    }
};

const driver_functions& driver() noexcept {
    static const driver_functions functions;
    return functions;
}

/// For all results of these calls, driver and runtime use the same numbers.
cudaError_t from_driver(CUresult result) noexcept {
    return static_cast<cudaError_t>(result);
}

}  // namespace

scoped_failure_hook::scoped_failure_hook(failure_hook hook) : scope_(installed_hooks, std::move(hook)) {}

scoped_failure_hook::~scoped_failure_hook() {
    first_fatal.store(cudaSuccess);
}

bool is_fatal(cudaError_t status) noexcept {
    switch (status) {
        case cudaErrorECCUncorrectable:
        case cudaErrorNvlinkUncorrectable:
        case cudaErrorContained:
        case cudaErrorIllegalAddress:
        case cudaErrorLaunchTimeout:
        case cudaErrorContextIsDestroyed:
        case cudaErrorAssert:
        case cudaErrorHardwareStackError:
        case cudaErrorIllegalInstruction:
        case cudaErrorMisalignedAddress:
        case cudaErrorInvalidAddressSpace:
        case cudaErrorInvalidPc:
        case cudaErrorLaunchFailure:
        case cudaErrorTensorMemoryLeak:
        case cudaErrorMpsClientTerminated:
        case cudaErrorExternalDevice:
            return true;
        default:
            return false;
    }
}

std::string cause(cudaError_t status) {
    if (forked()) {
        return "CUDA was started before this process was forked and cannot be used in it; start the child "
               "with exec, "
               "or use CUDA for the first time after fork";
    }
    std::string text = fmt::format("{} ({})", cudaGetErrorName(status), cudaGetErrorString(status));
    if (is_fatal(status)) {
        text += "; CUDA cannot be used any more in this process, which has to be started again";
    } else if (status == cudaErrorHostMemoryAlreadyRegistered) {
        text += "; something else in this process has registered a part of these pages";
    } else if (status == cudaErrorInsufficientDriver) {
        text += "; the driver is missing, or older than the CUDA that pinflow was built with";
    }
    return text;
}

void fail(std::string_view attempt, cudaError_t status) {
    const std::string text = fmt::format("{}: {}", attempt, cause(status));
    if (is_fatal(status)) throw fatal_device_error(text);
    throw device_error(text);
}

// ---- devices and contexts -----------------------------------------------------------------------

cudaError_t device_count(int& count) noexcept {
    return attempt("cudaGetDeviceCount", [&] { return cudaGetDeviceCount(&count); });
}

cudaError_t device_attribute(int& value, cudaDeviceAttr attribute, int device) noexcept {
    return attempt("cudaDeviceGetAttribute",
                   [&] { return cudaDeviceGetAttribute(&value, attribute, device); });
}

cudaError_t device_properties(cudaDeviceProp& properties, int device) noexcept {
    return attempt("cudaGetDeviceProperties", [&] { return cudaGetDeviceProperties(&properties, device); });
}

cudaError_t memory_info(std::size_t& free_bytes, std::size_t& total_bytes) noexcept {
    return attempt("cudaMemGetInfo", [&] { return cudaMemGetInfo(&free_bytes, &total_bytes); });
}

cudaError_t load_kernel(const void* kernel, int* architecture) noexcept {
    return attempt("cudaFuncGetAttributes", [&] {
        cudaFuncAttributes attributes{};
        const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
        if (architecture != nullptr) *architecture = attributes.ptxVersion;
        return status;
    });
}

cudaError_t retain_primary_context(CUcontext& context, int device) noexcept {
    return attempt("cuDevicePrimaryCtxRetain", [&] {
        if (driver().status != cudaSuccess) return driver().status;
        return from_driver(driver().retain_primary(&context, device));
    });
}

cudaError_t create_context(CUcontext& context, int device) noexcept {
    return attempt("cuCtxCreate", [&] {
        if (driver().status != cudaSuccess) return driver().status;
        const cudaError_t status = from_driver(driver().create_context(&context, CU_CTX_SCHED_AUTO, device));
        if (status == cudaSuccess) static_cast<void>(pop_context());  // a new context is current
        return status;
    });
}

cudaError_t current_context(CUcontext& context) noexcept {
    return attempt("cuCtxGetCurrent", [&] {
        if (driver().status != cudaSuccess) return driver().status;
        return from_driver(driver().get_current(&context));
    });
}

cudaError_t push_context(CUcontext context) noexcept {
    return attempt("cuCtxPushCurrent", [&] { return from_driver(driver().push_current(context)); });
}

cudaError_t pop_context() noexcept {
    CUcontext popped = nullptr;
    // not an attempt: the context must be popped even after a sticky error
    const auto pop = driver().pop_current;
    return pop == nullptr ? cudaErrorInitializationError : from_driver(pop(&popped));
}

void exchange_capture_mode(CUstreamCaptureMode& mode) noexcept {
    // not an attempt: it reaches no device, and the mode must be set back even after a sticky error
    const auto exchange = driver().exchange_capture_mode;
    if (exchange != nullptr) static_cast<void>(exchange(&mode));
}

// ---- streams and events -------------------------------------------------------------------------

bool is_legacy_stream(cudaStream_t stream) noexcept {
    return stream == nullptr || stream == cudaStreamLegacy;
}

cudaError_t create_stream(cudaStream_t& stream) noexcept {
    return attempt("cudaStreamCreateWithFlags",
                   [&] { return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); });
}

cudaError_t destroy_stream(cudaStream_t stream) noexcept {
    return attempt("cudaStreamDestroy", [&] { return cudaStreamDestroy(stream); });
}

cudaError_t synchronize_stream(cudaStream_t stream) noexcept {
    return attempt("cudaStreamSynchronize", [&] { return cudaStreamSynchronize(stream); });
}

cudaError_t query_stream(cudaStream_t stream) noexcept {
    return attempt("cudaStreamQuery", [&] { return cudaStreamQuery(stream); });
}

cudaError_t is_capturing(bool& answer, cudaStream_t stream) noexcept {
    return attempt("cudaStreamIsCapturing", [&] {
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        const cudaError_t status = cudaStreamIsCapturing(stream, &capture);
        if (status != cudaErrorStreamCaptureImplicit) {
            answer = capture != cudaStreamCaptureStatusNone;
            return status;
        }
        static_cast<void>(cudaGetLastError());
        answer = true;
        return cudaSuccess;
    });
}

cudaError_t launch_host_function(cudaStream_t stream, cudaHostFn_t function, void* data) noexcept {
    return attempt("cudaLaunchHostFunc", [&] { return cudaLaunchHostFunc(stream, function, data); });
}

cudaError_t stream_wait_value(cudaStream_t stream, const std::uint32_t* word, std::uint32_t value) noexcept {
    return attempt("cuStreamWaitValue32", [&] {
        // pinned memory has the same address on both sides
        const auto address = reinterpret_cast<CUdeviceptr>(word);
        return from_driver(driver().wait_value(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ));
    });
}

cudaError_t create_event(cudaEvent_t& event) noexcept {
    return attempt("cudaEventCreateWithFlags",
                   [&] { return cudaEventCreateWithFlags(&event, cudaEventDisableTiming); });
}

cudaError_t destroy_event(cudaEvent_t event) noexcept {
    return attempt("cudaEventDestroy", [&] { return cudaEventDestroy(event); });
}

cudaError_t record_event(cudaEvent_t event, cudaStream_t stream) noexcept {
    return attempt("cudaEventRecord", [&] { return cudaEventRecord(event, stream); });
}

cudaError_t stream_wait_event(cudaStream_t stream, cudaEvent_t event) noexcept {
    return attempt("cudaStreamWaitEvent", [&] { return cudaStreamWaitEvent(stream, event, 0); });
}

cudaError_t query_event(cudaEvent_t event) noexcept {
    return attempt("cudaEventQuery", [&] { return cudaEventQuery(event); });
}

// ---- memory -------------------------------------------------------------------------------------

cudaError_t create_pool(cudaMemPool_t& pool, int device, std::uint64_t keep_bytes) noexcept {
    return attempt("cudaMemPoolCreate", [&] {
        cudaMemPoolProps properties{};
        properties.allocType = cudaMemAllocationTypePinned;
        properties.handleTypes = cudaMemHandleTypeNone;
        properties.location.type = cudaMemLocationTypeDevice;
        properties.location.id = device;
        cudaError_t status = cudaMemPoolCreate(&pool, &properties);
        if (status != cudaSuccess) return status;
        status = cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep_bytes);
        // reuse must not add dependencies between streams: they could cause a deadlock
        int no = 0;
        if (status == cudaSuccess) {
            status = cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &no);
        }
        if (status != cudaSuccess) static_cast<void>(cudaMemPoolDestroy(pool));
        return status;
    });
}

cudaError_t allocate(void*& data, std::size_t size_bytes, cudaMemPool_t pool, cudaStream_t stream) noexcept {
    return attempt("cudaMallocFromPoolAsync",
                   [&] { return cudaMallocFromPoolAsync(&data, size_bytes, pool, stream); });
}

cudaError_t free(void* data, cudaStream_t stream) noexcept {
    return attempt("cudaFreeAsync", [&] { return cudaFreeAsync(data, stream); });
}

cudaError_t host_allocate(void*& data, std::size_t size_bytes) noexcept {
    return attempt("cudaHostAlloc", [&] {
        return cudaHostAlloc(&data, size_bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    });
}

cudaError_t host_free(void* data) noexcept {
    return attempt("cudaFreeHost", [&] { return cudaFreeHost(data); });
}

cudaError_t host_register(void* data, std::size_t size_bytes, bool read_only) noexcept {
    const unsigned flags =
        cudaHostRegisterPortable | cudaHostRegisterMapped | (read_only ? cudaHostRegisterReadOnly : 0U);
    return attempt("cudaHostRegister", [&] { return cudaHostRegister(data, size_bytes, flags); });
}

cudaError_t host_unregister(void* data) noexcept {
    return attempt("cudaHostUnregister", [&] { return cudaHostUnregister(data); });
}

cudaError_t host_device_pointer(void*& device_pointer, void* data) noexcept {
    return attempt("cudaHostGetDevicePointer",
                   [&] { return cudaHostGetDevicePointer(&device_pointer, data, 0); });
}

cudaError_t pointer_attributes(cudaPointerAttributes& attributes, const void* data) noexcept {
    return attempt("cudaPointerGetAttributes", [&] { return cudaPointerGetAttributes(&attributes, data); });
}

cudaError_t pointer_range(std::span<const std::byte>& range, const void* data) noexcept {
    return attempt("cuPointerGetAttribute", [&] {
        if (driver().status != cudaSuccess) return driver().status;
        const auto address = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(data));
        const std::byte* begin = nullptr;
        std::size_t size_bytes = 0;
        CUresult status = driver().pointer_attribute(static_cast<void*>(&begin),
                                                     CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address);
        if (status == CUDA_SUCCESS)
            status = driver().pointer_attribute(&size_bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address);
        if (status == CUDA_SUCCESS) range = {begin, size_bytes};
        return from_driver(status);
    });
}

cudaError_t copy(void* destination, const void* source, std::size_t size_bytes, cudaMemcpyKind kind,
                 cudaStream_t stream) noexcept {
    return attempt("cudaMemcpyAsync",
                   [&] { return cudaMemcpyAsync(destination, source, size_bytes, kind, stream); });
}

cudaError_t copy_strided(void* destination, const void* source, std::size_t run_bytes,
                         std::size_t stride_bytes, std::size_t count, cudaStream_t stream) noexcept {
    return attempt("cudaMemcpy2DAsync", [&] {
        return cudaMemcpy2DAsync(destination, run_bytes, source, stride_bytes, run_bytes, count,
                                 cudaMemcpyHostToDevice, stream);
    });
}

cudaError_t copy_batch(std::span<void*> destinations, std::span<const void*> sources,
                       std::span<std::size_t> sizes, cudaStream_t stream) noexcept {
    return attempt("cudaMemcpyBatchAsync", [&] {
        cudaMemcpyAttributes attributes{};
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        std::size_t first_copy = 0;  // index of the first copy that the attributes apply to
#if CUDART_VERSION >= 13000
        return cudaMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), sizes.size(),
                                    &attributes, &first_copy, 1, stream);
#else
        std::size_t failed_copy = 0;
        return cudaMemcpyBatchAsync(destinations.data(), const_cast<void**>(sources.data()), sizes.data(),
                                    sizes.size(), &attributes, &first_copy, 1, &failed_copy, stream);
#endif
    });
}

cudaError_t fill_zero(void* data, std::size_t size_bytes, cudaStream_t stream) noexcept {
    return attempt("cudaMemsetAsync", [&] { return cudaMemsetAsync(data, 0, size_bytes, stream); });
}

// ---- kernels ------------------------------------------------------------------------------------

cudaError_t launch(const void* kernel, dim3 blocks, unsigned threads, void** arguments,
                   cudaStream_t stream) noexcept {
    return attempt("cudaLaunchKernel",
                   [&] { return cudaLaunchKernel(kernel, blocks, dim3(threads), arguments, 0, stream); });
}

cudaError_t launch_early(const void* kernel, dim3 blocks, unsigned threads, void** arguments,
                         cudaStream_t stream) noexcept {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return attempt("cudaLaunchKernelExC", [&] { return cudaLaunchKernelExC(&config, kernel, arguments); });
}

bool runs_in_pairs(const void* kernel, unsigned threads) noexcept {
    const paired_launch launch(2, threads, nullptr);
    int clusters = 0;
    const cudaError_t status = attempt("cudaOccupancyMaxActiveClusters", [&] {
        return cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config);
    });
    return status == cudaSuccess && clusters > 0;
}

cudaError_t launch_pairs(const void* kernel, unsigned blocks, unsigned threads, void** arguments,
                         cudaStream_t stream) noexcept {
    const paired_launch launch(blocks, threads, stream);
    return attempt("cudaLaunchKernelExC",
                   [&] { return cudaLaunchKernelExC(&launch.config, kernel, arguments); });
}

cudaError_t resident_blocks(int& blocks, const void* kernel, unsigned threads) noexcept {
    return attempt("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&] {
        return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads), 0);
    });
}

cudaError_t launch_together(const void* kernel, unsigned blocks, unsigned threads, void** arguments,
                            cudaStream_t stream) noexcept {
    return attempt("cudaLaunchCooperativeKernel", [&] {
        return cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, stream);
    });
}

cudaError_t sort_ids(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* ids,
                     std::uint64_t* sorted_ids, const std::uint32_t* positions,
                     std::uint32_t* sorted_positions, std::uint64_t count, int bits,
                     cudaStream_t stream) noexcept {
    return attempt("cub::DeviceRadixSort::SortPairs", [&] {
        return sort_pairs(scratch, scratch_bytes, ids, sorted_ids, positions, sorted_positions, count, bits,
                          stream);
    });
}

}  // namespace pinflow::detail::cuda
