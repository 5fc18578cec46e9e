#include "src/device/cuda/copy_list.hpp"

#include <algorithm>
#include <span>

namespace pinflow::detail::cuda {

copy_list::copy_list(std::size_t count) {
    destinations_.reserve(count);
    sources_.reserve(count);
    sizes_.reserve(count);
}

void copy_list::add(void* destination, const void* source, std::size_t size_bytes) {
    destinations_.push_back(destination);
    sources_.push_back(source);
    sizes_.push_back(size_bytes);
}

cudaError_t copy_list::enqueue(cudaMemcpyKind kind, cudaStream_t stream) noexcept {
    // one copy needs no batch, the legacy default stream takes none, and an old driver may have none
    if (sizes_.size() > 1 && !is_legacy_stream(stream)) {
        const cudaError_t status = enqueue_batches(stream);
        if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver) return status;
    }
    return enqueue_one_by_one(kind, stream);
}

/// With 512 copies of 12 KiB in one batch, driver 580 is half as fast, and it has crashed
/// (samples/bench/NOTEBOOK.md).
cudaError_t copy_list::enqueue_batches(cudaStream_t stream) noexcept {
    constexpr std::size_t max_copies = 256;
    for (std::size_t first = 0; first < sizes_.size(); first += max_copies) {
        const std::size_t count = std::min(max_copies, sizes_.size() - first);
        const cudaError_t status = copy_batch(std::span(destinations_).subspan(first, count),
                                              std::span(sources_).subspan(first, count),
                                              std::span(sizes_).subspan(first, count), stream);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

cudaError_t copy_list::enqueue_one_by_one(cudaMemcpyKind kind, cudaStream_t stream) const noexcept {
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
        const cudaError_t status = copy(destinations_[i], sources_[i], sizes_[i], kind, stream);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

}  // namespace pinflow::detail::cuda
