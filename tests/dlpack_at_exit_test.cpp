// A process that ends while it has tensors: they are deleted after main has returned, and after CUDA's
// runtime has unloaded. It must exit with 0.

#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/dlpack.hpp"
#include "pinflow/loader/loader.hpp"

using namespace pinflow;

namespace {

/// Made before anything calls CUDA, so destroyed after CUDA's own static objects.
struct kept_until_exit {
    kept_until_exit() = default;
    kept_until_exit(const kept_until_exit&) = delete;
    kept_until_exit& operator=(const kept_until_exit&) = delete;
    ~kept_until_exit() {
        std::thread([half = std::move(on_a_thread)]() mutable { half.clear(); }).join();
        tensors.clear();
        std::puts("all tensors were deleted after main");
    }
    std::vector<dlpack::exported_tensor<>> tensors;
    std::vector<dlpack::exported_tensor<>> on_a_thread;
};
kept_until_exit kept;

array rows_in_memory() {
    constexpr std::uint64_t row_count = 1000;
    constexpr std::uint64_t row_bytes = 4096;
    auto memory = memory_region::anonymous(row_count * row_bytes);
    std::memset(memory.data(), 1, row_count * row_bytes);
    return {std::move(memory), dtype::of<std::uint8_t>(), {row_count, row_bytes}};
}

void keep_tensors(const device& device) {
    const array rows = rows_in_memory();
    // streams live until the leases end
    static auto& streams = *new std::vector<stream>;
    streams.emplace_back(device);
    const stream_view stream = streams.back();
    loader loader({rows}, {.device = device, .batch_rows = 10, .order = order::shuffled, .slots = 4});
    for (auto* list : {&kept.tensors, &kept.on_a_thread}) {
        auto batch = loader.next(stream);
        list->push_back(to_dlpack(*batch, 0, stream));
        list->push_back(to_dlpack(rows));
    }
}

}  // namespace

int main() {
    for (const device& each : device::all())
        keep_tensors(each);
    return 0;
}
