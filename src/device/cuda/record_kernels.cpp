#include "src/device/cuda/record_kernels.hpp"

#include <algorithm>
#include <cstdint>

#include "src/device/cuda/blocks_for.hpp"
#include "src/device/cuda/flat.hpp"
#include "src/device/cuda/group_rows.hpp"
#include "src/device/cuda/records.hpp"

namespace pinflow::detail::cuda {

namespace {

/// A warp for each row, but at most 8 blocks for each multiprocessor: the kernels loop over the other rows.
unsigned blocks_for_rows(std::uint64_t rows, unsigned multiprocessors) noexcept {
    return blocks_for(rows, record_threads / 32, std::uint64_t{multiprocessors} * 8);
}

}  // namespace

cudaError_t load_records(rule_kind rule) noexcept {
    for (const void* const kernel :
         {patch_records_kernel(), sum_frequent_kernel(), update_records_kernel(rule), set_number(),
          count_ids_kernel(), write_groups_kernel()}) {
        if (const cudaError_t status = load_kernel(kernel); status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

cudaError_t group_rows(const row_grouping& work, cudaStream_t stream) noexcept {
    row_grouping copy = work;
    void* arguments[] = {&copy};
    const auto blocks =
        static_cast<unsigned>((work.sorted.count + row_grouping::tile - 1) / row_grouping::tile);
    const cudaError_t status = launch(count_ids_kernel(), blocks, group_threads, arguments, stream);
    if (status != cudaSuccess) return status;
    return launch(write_groups_kernel(), blocks, group_threads, arguments, stream);
}

cudaError_t patch_records(const record_patch& work, unsigned multiprocessors, cudaStream_t stream) noexcept {
    record_patch copy = work;
    void* arguments[] = {&copy};
    return launch(patch_records_kernel(), blocks_for_rows(work.rows.max_count, multiprocessors),
                  record_threads, arguments, stream);
}

cudaError_t update_records(const record_update& work, unsigned multiprocessors,
                           cudaStream_t stream) noexcept {
    record_update copy = work;
    void* arguments[] = {&copy};
    if (work.position_count >= frequent_gradients) {
        const std::uint64_t frequent = work.position_count / frequent_gradients;
        const unsigned blocks =
            blocks_for(std::min(work.rows.max_count, frequent), 1, std::uint64_t{multiprocessors} * 4);
        const cudaError_t status = launch(sum_frequent_kernel(), blocks, sum_threads, arguments, stream);
        if (status != cudaSuccess) return status;
    }
    return launch(update_records_kernel(work.rule), blocks_for_rows(work.rows.max_count, multiprocessors),
                  record_threads, arguments, stream);
}

}  // namespace pinflow::detail::cuda
