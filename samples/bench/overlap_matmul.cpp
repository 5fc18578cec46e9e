// overlap_matmul FILE
//
// Measures how much arriving batches slow a computing consumer: steps of a bf16 matrix product, 8192 cubed,
// by cuBLAS, alone and while a loader streams the rows of FILE in random order. FILE is an .npy in the page
// cache; the copy engine moves large rows, kernels move rows under 48 KiB. Batches take twice as long to copy
// as the product (so that the copy is the limit), as long, and half as long. Prints one "name value unit" a
// line; exit 77 without a CUDA device.

#include <cublas_v2.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/pinflow.hpp"

namespace {

using namespace pinflow;
using clock = std::chrono::steady_clock;

double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
}

void print(const std::string& name, double value, const char* unit) {
    std::printf("%-52s %10.4f %s\n", name.c_str(), value, unit);
    std::fflush(stdout);
}

double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
}

void check(cublasStatus_t status) {
    if (status != CUBLAS_STATUS_SUCCESS) throw device_error(cublasGetStatusString(status));
}

/// The product of two matrices of random numbers, on a stream of its own.
class product {
 public:
    explicit product(const device& gpu)
        : stream_(gpu), a_(bytes, stream_), b_(bytes, stream_), c_(bytes, stream_) {
        check(cublasCreate(&handle_));
        check(cublasSetStream(handle_, to_cuda(stream_)));
        // bf16 numbers of random sign, whose absolute values are at least 0.25 and below 0.5
        pinned_buffer host(bytes, gpu);
        auto* const words = reinterpret_cast<std::uint16_t*>(host.data());
        std::uint64_t state = 1;
        for (const device_buffer* matrix : {&a_, &b_}) {
            for (std::uint64_t i = 0; i < bytes / 2; ++i) {
                state = state * 6364136223846793005 + 1442695040888963407;
                words[i] = static_cast<std::uint16_t>((state >> 48 & 0x807F) | 0x3E80);
            }
            copy_to_device_async(matrix->data(), host.bytes(), stream_);
            stream_.synchronize();
        }
    }
    product(const product&) = delete;
    product& operator=(const product&) = delete;
    ~product() {
        stream_.synchronize();
        cublasDestroy(handle_);
    }

    void run() const {
        const float one = 1;
        const float zero = 0;
        check(cublasGemmEx(handle_, CUBLAS_OP_N, CUBLAS_OP_T, size, size, size, &one, a_.data(), CUDA_R_16BF,
                           size, b_.data(), CUDA_R_16BF, size, &zero, c_.data(), CUDA_R_16BF, size,
                           CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
    const pinflow::stream& stream() const { return stream_; }

 private:
    static constexpr int size = 8192;
    static constexpr std::uint64_t bytes = std::uint64_t{size} * size * 2;

    pinflow::stream stream_;
    device_buffer a_;
    device_buffer b_;
    device_buffer c_;
    cublasHandle_t handle_ = nullptr;
};

double product_seconds(const product& product) {
    constexpr int products = 400;
    std::vector<double> runs;
    for (int run = 0; run < 7; ++run) {
        const auto start = clock::now();
        for (int i = 0; i < products; ++i)
            product.run();
        product.stream().synchronize();
        runs.push_back(seconds_since(start) / products);
    }
    return median(runs);
}

/// Returns the seconds per batch over at least 1000 batches, in whole epochs. The first epoch is not timed,
/// because pages are registered during it. The other epochs are timed as one interval, because prefetching
/// crosses epoch boundaries.
double step_seconds(const char* path, const device& gpu, std::uint64_t batch_rows, const product* consumer) {
    constexpr std::uint64_t min_steps = 1000;
    const stream idle(gpu);
    const stream_view stream = consumer == nullptr ? idle.view() : consumer->stream().view();
    const array file = open_npy(path);
    const std::uint64_t batches_of_epoch = file.rows()->row_count() / batch_rows;
    if (batches_of_epoch == 0) {
        throw invalid_argument(std::string(path) + " has fewer rows than a batch of " +
                               std::to_string(batch_rows));
    }
    const std::uint64_t epochs = 1 + (min_steps + batches_of_epoch - 1) / batches_of_epoch;
    loader loader({file}, {.device = gpu,
                           .batch_rows = batch_rows,
                           .order = order::shuffled,
                           .epochs = epochs,
                           .tail = tail::drop,
                           .memory_bytes = std::uint64_t{4} << 30});
    auto start = clock::now();
    for (std::uint64_t step = 0; step < epochs * batches_of_epoch; ++step) {
        if (step == batches_of_epoch) {
            stream.synchronize();
            start = clock::now();
        }
        const auto batch = loader.next(stream);
        if (consumer != nullptr) consumer->run();
    }
    stream.synchronize();
    return seconds_since(start) / static_cast<double>((epochs - 1) * batches_of_epoch);
}

/// A batch of this size takes about as long to copy as a product. It is timed to learn how long a row takes.
constexpr double typical_batch_bytes = 64 << 20;

void measure(const char* path) {
    const device gpu = device::cuda(0);
    const product product(gpu);
    const auto row_bytes = static_cast<double>(open_npy(path).rows()->row_size_bytes());
    if (row_bytes == 0) throw invalid_argument(std::string(path) + " has rows of no bytes");
    product_seconds(product);  // warm
    const double alone = product_seconds(product);
    print("product alone", 1e3 * alone, "ms");
    print("product alone", 2 * 8192.0 * 8192.0 * 8192.0 / alone / 1e12, "TFLOP/s");
    const double typical_rows = std::max(1.0, std::floor(typical_batch_bytes / row_bytes));
    const double row_seconds =
        step_seconds(path, gpu, static_cast<std::uint64_t>(typical_rows), nullptr) / typical_rows;
    print("batches alone", row_bytes / row_seconds / 1e9, "GB/s");
    for (const double share : {2.0, 1.0, 0.5}) {
        const auto batch_rows = static_cast<std::uint64_t>(std::max(1.0, share * alone / row_seconds));
        const std::string name = share > 1    ? "batches twice as long as the product: "
                                 : share == 1 ? "batches as long as the product: "
                                              : "batches half as long: ";
        const double copy = step_seconds(path, gpu, batch_rows, nullptr);
        print(name + "copy alone, a step", 1e3 * copy, "ms");
        const double both = step_seconds(path, gpu, batch_rows, &product);
        const double again = product_seconds(product);
        print(name + "both, a step", 1e3 * both, "ms");
        print(name + "product alone, again", 1e3 * again, "ms");
        // a disturbed run of the product must not hide that both together took longer
        print(name + "both, ratio to the longer", both / std::max(copy, std::min(alone, again)), "");
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (device::cuda_count() == 0) {
        std::printf("skipped: %s\n", device::no_cuda_reason().c_str());
        return 77;
    }
    if (argc != 2) {
        std::fprintf(stderr, "usage: overlap_matmul FILE\n");
        return 2;
    }
    try {
        measure(argv[1]);
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "overlap_matmul: error: %s\n", failure.what());
        return 1;
    }
    return 0;
}
