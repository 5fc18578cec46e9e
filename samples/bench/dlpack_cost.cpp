// dlpack_cost
//
// What a tensor of a batch costs, on the host and on the first GPU: medians over 1,000 batches of the host
// thread's time to export one of its two arrays and to delete the tensor, in nanoseconds, and the device
// memory that 1,000 tensors held at once take. One "name value unit" a line.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/dlpack.hpp"
#include "pinflow/loader/loader.hpp"

namespace {

using clock = std::chrono::steady_clock;

pinflow::array zeros(std::uint64_t row_count, std::uint64_t row_bytes) {
    auto memory = pinflow::memory_region::anonymous(row_count * row_bytes);
    std::memset(memory.data(), 0, row_count * row_bytes);
    return {std::move(memory), pinflow::dtype::of<std::uint8_t>(), {row_count, row_bytes}};
}

double median_ns(std::vector<clock::duration> times) {
    std::ranges::sort(times);
    return std::chrono::duration<double, std::nano>(times[times.size() / 2]).count();
}

template <typename Managed>
void measure(const pinflow::device& device, const char* structure) {
    constexpr std::uint64_t row_count = 64000;
    const pinflow::array images = zeros(row_count, 4096);
    const pinflow::array labels = zeros(row_count, 8);
    const pinflow::stream stream(device);
    pinflow::loader loader({images, labels}, {.device = device, .batch_rows = 64});
    std::vector<clock::duration> exports;
    std::vector<clock::duration> deletions;
    while (auto batch = loader.next(stream)) {
        for (std::size_t index = 0; index < 2; ++index) {
            const auto start = clock::now();
            auto tensor = pinflow::to_dlpack<Managed>(*batch, index, stream);
            const auto exported = clock::now();
            tensor.reset();
            exports.push_back(exported - start);
            deletions.push_back(clock::now() - exported);
        }
    }
    const std::string name = device.name() + " " + structure;
    std::printf("%s: export %.0f ns\n", name.c_str(), median_ns(exports));
    std::printf("%s: delete %.0f ns\n", name.c_str(), median_ns(deletions));
}

void measure_memory(const pinflow::device& device) {
    const pinflow::array rows = zeros(1000, 4096);
    const pinflow::stream stream(device);
    pinflow::loader loader({rows}, {.device = device, .batch_rows = 64});
    auto batch = loader.next(stream);
    if (!batch) return;
    stream.synchronize();
    std::vector<pinflow::dlpack::exported_tensor<>> held;
    const std::uint64_t before = device.memory().free_bytes;
    for (int i = 0; i < 1000; ++i)
        held.push_back(pinflow::to_dlpack(*batch, 0, stream));
    const std::uint64_t after = device.memory().free_bytes;
    std::printf("%s: device memory of 1000 tensors %lld bytes\n", device.name().c_str(),
                static_cast<long long>(before) - static_cast<long long>(after));
}

}  // namespace

int main() try {
    std::vector<pinflow::device> devices{pinflow::device::host()};
    if (pinflow::device::cuda_count() > 0) devices.push_back(pinflow::device::cuda(0));
    for (const pinflow::device& device : devices) {
        measure<pinflow::dlpack::managed_tensor_versioned>(device, "versioned");
        measure<pinflow::dlpack::managed_tensor>(device, "older structure");
        if (device.kind() == pinflow::device_kind::cuda) measure_memory(device);
    }
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "dlpack_cost: %s\n", error.what());
    return 1;
}
