#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/loader/loader.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/devices.hpp"

// Tensors of batches on a GPU: on the per-thread default stream, and on a stream that is being captured.
using namespace pinflow;

namespace {

constexpr std::uint64_t width = 16;

loader make_loader(const device& gpu) {
    return loader({numbered_rows(1000, width)},
                  {.device = gpu, .batch_rows = 10, .order = order::shuffled, .epochs = 3, .slots = 2});
}

}  // namespace

TEST_CASE("cuda dlpack: a tensor on the per-thread default stream may be deleted by another thread" *
          blocks_a_stream) {
    const device gpu = device::cuda(0);
    loader loader = make_loader(gpu);
    const stream other(gpu);
    const gate gate;
    const pinned_buffer seen(10 * width * sizeof(std::uint64_t), gpu);
    std::vector<std::uint64_t> ids;
    const stream_view per_thread = from_cuda(cudaStreamPerThread, gpu.index());
    {
        auto batch = loader.next(per_thread);
        REQUIRE(batch);
        ids.assign(batch->row_ids().begin(), batch->row_ids().end());
        auto tensor = to_dlpack(*batch, 0, per_thread);
        batch->release();
        hold(per_thread, gate);
        copy_to_host_async(seen.bytes(), static_cast<const std::byte*>(tensor->dl_tensor.data), per_thread);
        std::thread([last = std::move(tensor)]() mutable { last.reset(); }).join();
    }
    for (int i = 0; i < 10; ++i) {
        const auto batch = loader.next(other);
        REQUIRE(batch);
        CHECK(holds_its_rows(*batch, other));
    }
    gate.open();
    per_thread.synchronize();
    std::vector<std::uint64_t> elements(10 * width);
    std::memcpy(elements.data(), seen.data(), seen.size_bytes());
    for (std::size_t i = 0; i < elements.size(); ++i)
        REQUIRE(elements[i] == ids[i / width]);
}

TEST_CASE(
    "cuda dlpack: a tensor that is deleted while its stream is being captured does not break the capture") {
    const device gpu = device::cuda(0);
    loader loader = make_loader(gpu);
    const stream consumer(gpu);
    const stream other(gpu);
    auto batch = loader.next(consumer);
    REQUIRE(batch);
    auto tensor = to_dlpack(*batch, 0, consumer);
    batch->release();
    const device_buffer memory(64, consumer);
    consumer.synchronize();
    const cudaStream_t handle = to_cuda(consumer);
    REQUIRE(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(cudaMemsetAsync(memory.data(), 1, 64, handle) == cudaSuccess);
    tensor.reset();
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(handle, &graph) == cudaSuccess);
    REQUIRE(graph != nullptr);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    // the loader delivers further batches in its other slot
    for (int i = 0; i < 10; ++i) {
        const auto next = loader.next(other);
        REQUIRE(next);
        CHECK(holds_its_rows(*next, other));
    }
}
