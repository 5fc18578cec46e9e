#include "src/device/cuda/flat_kernels.hpp"

#include <algorithm>
#include <cstdint>

#include "src/device/cuda/blocks_for.hpp"
#include "src/device/cuda/flat.hpp"

namespace pinflow::detail::cuda {

namespace {

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
    // the same number of chunks for each block (the last may have fewer)
    const std::uint64_t chunks = norm_sum_count(work.buffers.pack_count);
    const std::uint64_t max_blocks = std::uint64_t{device.multiprocessors} * 8;
    const std::uint64_t rounds = std::max<std::uint64_t>(1, (chunks + max_blocks - 1) / max_blocks);
    const unsigned blocks = blocks_for(chunks, rounds, max_blocks);
    return launch_on(device, check_flat(), blocks, norm_threads, arguments, stream);
}

cudaError_t update_parameters(const flat_step& work, const flat_device& device,
                              cudaStream_t stream) noexcept {
    flat_step copy = work;
    void* arguments[] = {&copy};
    const bool doubles = work.buffers.has_doubles;
    const unsigned blocks = blocks_for(work.buffers.pack_count, update_threads,
                                       std::uint64_t{device.multiprocessors} * update_blocks(doubles));
    return launch_on(device, update_flat(work.rule, doubles), blocks, update_threads, arguments, stream);
}

cudaError_t set_number_of(double* destination, double value, cudaStream_t stream) noexcept {
    void* arguments[] = {&destination, &value};
    return launch(set_number(), 1, 1, arguments, stream);
}

}  // namespace pinflow::detail::cuda
