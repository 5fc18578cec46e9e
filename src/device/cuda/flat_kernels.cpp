#include "src/device/cuda/flat_kernels.hpp"

#include <algorithm>
#include <cstdint>

#include "src/device/cuda/flat.hpp"

namespace pinflow::detail::cuda {

namespace {

/// As many blocks as the work has use for, at most `blocks_per_multiprocessor` for each multiprocessor: the
/// kernels loop over the rest.
unsigned blocks_for(std::uint64_t work, std::uint64_t work_of_block, unsigned multiprocessors,
                    unsigned blocks_per_multiprocessor) noexcept {
    const std::uint64_t needed = (work + work_of_block - 1) / work_of_block;
    return static_cast<unsigned>(
        std::clamp<std::uint64_t>(needed, 1, std::uint64_t{multiprocessors} * blocks_per_multiprocessor));
}

cudaError_t launch_on(const flat_device& device, const void* kernel, unsigned blocks, unsigned threads,
                      void** arguments, cudaStream_t stream) noexcept {
    return device.starts_early ? launch_early(kernel, blocks, threads, arguments, stream)
                               : launch(kernel, blocks, threads, arguments, stream);
}

}  // namespace

cudaError_t load_updates(rule_kind rule) noexcept {
    for (const void* const kernel :
         {update_flat(rule, false), update_flat(rule, true), check_flat(), set_number()}) {
        if (const cudaError_t status = load_kernel(kernel); status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

cudaError_t check_gradients(const gradient_check& work, const flat_device& device,
                            cudaStream_t stream) noexcept {
    gradient_check copy = work;
    void* arguments[] = {&copy};
    const unsigned blocks = blocks_for(norm_sum_count(work.buffers.pack_count), 1, device.multiprocessors, 8);
    return launch_on(device, check_flat(), blocks, norm_threads, arguments, stream);
}

cudaError_t update_parameters(const flat_step& work, const flat_device& device,
                              cudaStream_t stream) noexcept {
    flat_step copy = work;
    void* arguments[] = {&copy};
    const bool doubles = work.buffers.has_doubles;
    const unsigned blocks =
        blocks_for(work.buffers.pack_count, update_threads, device.multiprocessors, update_blocks(doubles));
    return launch_on(device, update_flat(work.rule, doubles), blocks, update_threads, arguments, stream);
}

cudaError_t set_number_of(double* destination, double value, cudaStream_t stream) noexcept {
    void* arguments[] = {&destination, &value};
    return launch(set_number(), 1, 1, arguments, stream);
}

}  // namespace pinflow::detail::cuda
