// overlap FILE
//
// Measures whether the loader's copies and a consumer's kernels overlap: the time of a step with only the
// copy of a batch of 64 rows, with only a kernel as long as that copy, and with both. FILE is an .npy of
// large rows, in the page cache. Prints one "name value unit" a line; exit 77 without a CUDA device.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/pinflow.hpp"
#include "samples/bench/busy.hpp"

namespace {

using namespace pinflow;
using clock = std::chrono::steady_clock;

double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
}

void print(const char* name, double value, const char* unit) {
    std::printf("%-40s %10.4f %s\n", name, value, unit);
    std::fflush(stdout);
}

double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
}

/// The kernel for one batch, on the consumer's stream.
class consumer {
 public:
    explicit consumer(const device& gpu) : stream_(gpu), sink_(sizeof(float), stream_) {}

    void run(const std::byte* data, std::uint64_t size_bytes, unsigned rounds) const {
        const cudaError_t status =
            launch_busy(reinterpret_cast<const float*>(data), size_bytes / sizeof(float), rounds,
                        reinterpret_cast<float*>(sink_.data()), to_cuda(stream_));
        if (status != cudaSuccess) throw device_error("the consumer's kernel was not launched");
    }
    const pinflow::stream& stream() const { return stream_; }

 private:
    pinflow::stream stream_;
    device_buffer sink_;
};

constexpr int epochs = 6;

/// Median seconds a batch over the epochs, the first left out: pages are registered in it.
double step_seconds(const char* path, const device& gpu, const consumer& consumer, unsigned rounds,
                    bool compute) {
    loader loader({open_npy(path)}, {.device = gpu, .order = order::shuffled, .epochs = epochs});
    std::vector<double> steps;
    for (int epoch = 0; epoch < epochs; ++epoch) {
        const auto start = clock::now();
        for (std::uint64_t i = 0; i < loader.batches_per_epoch(); ++i) {
            const auto batch = loader.next(consumer.stream());
            if (compute) consumer.run((*batch)[0].data(), (*batch)[0].size_bytes(), rounds);
        }
        consumer.stream().synchronize();
        if (epoch > 0)
            steps.push_back(seconds_since(start) / static_cast<double>(loader.batches_per_epoch()));
    }
    return median(steps);
}

double kernel_seconds(const consumer& consumer, const device_buffer& batch, unsigned rounds) {
    constexpr int launches = 500;
    std::vector<double> runs;
    for (int run = 0; run < 5; ++run) {
        const auto start = clock::now();
        for (int i = 0; i < launches; ++i)
            consumer.run(batch.data(), batch.size_bytes(), rounds);
        consumer.stream().synchronize();
        runs.push_back(seconds_since(start) / launches);
    }
    return median(runs);
}

void measure(const char* path) {
    const device gpu = device::cuda(0);
    const consumer consumer(gpu);
    const device_buffer batch(64 * open_npy(path).rows()->row_size_bytes(), consumer.stream());
    const double copy = step_seconds(path, gpu, consumer, 0, false);
    print("copy alone, a step", 1e3 * copy, "ms");
    // makes the kernel as long as the copy: after reading the batch, its time is linear in the rounds
    double kernel = 0;
    unsigned rounds = 10'000;
    for (int i = 0; i < 4; ++i) {
        const double base = kernel_seconds(consumer, batch, 0);
        kernel = kernel_seconds(consumer, batch, rounds);
        rounds = static_cast<unsigned>(rounds * std::max(1e-6, copy - base) / std::max(1e-9, kernel - base));
    }
    kernel = kernel_seconds(consumer, batch, rounds);
    if (kernel < 0.9 * copy || kernel > 1.1 * copy)
        throw device_error("no kernel as long as the copy was found");
    print("kernel alone, a step", 1e3 * kernel, "ms");
    const double both = step_seconds(path, gpu, consumer, rounds, true);
    print("both, a step", 1e3 * both, "ms");
    print("both, ratio to the longer", both / std::max(copy, kernel), "");
}

}  // namespace

int main(int argc, char** argv) {
    if (device::cuda_count() == 0) {
        std::printf("skipped: %s\n", device::no_cuda_reason().c_str());
        return 77;
    }
    if (argc != 2) {
        std::fprintf(stderr, "usage: overlap FILE\n");
        return 2;
    }
    try {
        measure(argv[1]);
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "overlap: error: %s\n", failure.what());
        return 1;
    }
    return 0;
}
