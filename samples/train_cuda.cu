// Trains the classifier of train_digits on a GPU, with its own kernels and CUDA stream: the loader delivers
// to that stream, and kernels launched on it see the batch. Fails if it recognises fewer than 94% of the
// held-out digits.
//
//     train_cuda [FOLDER]        the folder with the four .npy files, samples/data by default

#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "pinflow/cuda.hpp"
#include "pinflow/pinflow.hpp"

namespace {

constexpr int pixel_count = 64;
constexpr int class_count = 10;
constexpr int weight_count = (pixel_count + 1) * class_count;  // a row for each pixel, and one for the bias
constexpr float learning_rate = 0.5F;
constexpr double required_percent = 94;

void check(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// A CUDA stream as any program makes one.
class cuda_stream {
 public:
    cuda_stream() { check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
    ~cuda_stream() { cudaStreamDestroy(handle_); }
    cuda_stream(const cuda_stream&) = delete;
    cuda_stream& operator=(const cuda_stream&) = delete;
    cudaStream_t get() const { return handle_; }

 private:
    cudaStream_t handle_ = nullptr;
};

/// Device memory that is zeroed on `stream`.
template <typename Element>
class device_array {
 public:
    device_array(std::size_t count, const cuda_stream& stream) {
        check(cudaMalloc(&data_, count * sizeof(Element)));
        check(cudaMemsetAsync(data_, 0, count * sizeof(Element), stream.get()));
    }
    ~device_array() { cudaFree(data_); }
    device_array(const device_array&) = delete;
    device_array& operator=(const device_array&) = delete;
    Element* get() const { return data_; }

 private:
    Element* data_ = nullptr;
};

/// The score of class `c`; the highest of all is the prediction.
__device__ float score(const float* weights, const std::uint8_t* image, int c) {
    float sum = weights[pixel_count * class_count + c];
    for (int p = 0; p < pixel_count; ++p)
        sum += weights[p * class_count + c] * static_cast<float>(image[p]) / 16;
    return sum;
}

/// Adds the gradient of the cross-entropy; one block for each row, one thread for each pixel and the bias.
__global__ void add_gradient(const float* weights, const std::uint8_t* images, const std::uint8_t* labels,
                             float* gradient) {
    __shared__ float error[class_count];  // probability minus truth, the loss's derivative
    const std::uint8_t* image = images + std::size_t{blockIdx.x} * pixel_count;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < class_count) error[thread] = score(weights, image, thread);
    __syncthreads();
    if (thread == 0) {
        float top = error[0];
        for (int c = 1; c < class_count; ++c)
            top = fmaxf(top, error[c]);
        float sum = 0;
        for (int c = 0; c < class_count; ++c)
            sum += error[c] = expf(error[c] - top);
        for (int c = 0; c < class_count; ++c)
            error[c] /= sum;
        error[labels[blockIdx.x]] -= 1;
    }
    __syncthreads();
    const float brightness = thread == pixel_count ? 1 : static_cast<float>(image[thread]) / 16;
    for (int c = 0; c < class_count; ++c)
        atomicAdd(&gradient[thread * class_count + c], error[c] * brightness);
}

/// One step down the gradient, which is zero afterwards.
__global__ void descend(float* weights, float* gradient, float rate) {
    const unsigned i = threadIdx.x;
    weights[i] -= rate * gradient[i];
    gradient[i] = 0;
}

__global__ void count_correct(const float* weights, const std::uint8_t* images, const std::uint8_t* labels,
                              unsigned* correct) {
    const std::uint8_t* image = images + std::size_t{blockIdx.x} * pixel_count;
    int best = 0;
    for (int c = 1; c < class_count; ++c)
        if (score(weights, image, c) > score(weights, image, best)) best = c;
    if (best == labels[blockIdx.x]) atomicAdd(correct, 1U);
}

pinflow::loader open_digits(const std::filesystem::path& folder, const std::string& part,
                            const pinflow::loader_options& options) {
    return pinflow::loader({pinflow::open_npy(folder / ("digits_" + part + "_images.npy")),
                            pinflow::open_npy(folder / ("digits_" + part + "_labels.npy"))},
                           options);
}

}  // namespace

int main(int argc, char** argv) try {
    const std::filesystem::path folder = argc > 1 ? argv[1] : "samples/data";
    pinflow::install_fault_guard();  // lets the CPU copy rows from mappings; otherwise it uses pread
    const pinflow::device gpu = pinflow::device::cuda(0);
    const cuda_stream stream;
    const pinflow::stream_view view = pinflow::from_cuda(stream.get(), 0);
    const device_array<float> weights(weight_count, stream);
    const device_array<float> gradient(weight_count, stream);
    const device_array<unsigned> correct(1, stream);

    pinflow::loader training = open_digits(
        folder, "train",
        {.device = gpu, .batch_rows = 32, .order = pinflow::order::shuffled, .seed = 1, .epochs = 50});
    while (const auto batch = training.next(view)) {  // blocks if batches are large: see loader::next
        const auto rows = static_cast<unsigned>(batch->row_count());
        add_gradient<<<rows, pixel_count + 1, 0, stream.get()>>>(
            weights.get(), (*batch)[0].as<std::uint8_t>(), (*batch)[1].as<std::uint8_t>(), gradient.get());
        descend<<<1, weight_count, 0, stream.get()>>>(weights.get(), gradient.get(),
                                                      learning_rate / static_cast<float>(rows));
        check(cudaGetLastError());
    }  // the batch ends here; its memory is filled again when the kernels have finished

    pinflow::loader testing = open_digits(folder, "test", {.device = gpu});
    while (const auto batch = testing.next(view)) {
        count_correct<<<static_cast<unsigned>(batch->row_count()), 1, 0, stream.get()>>>(
            weights.get(), (*batch)[0].as<std::uint8_t>(), (*batch)[1].as<std::uint8_t>(), correct.get());
        check(cudaGetLastError());
    }
    unsigned count = 0;
    check(cudaMemcpyAsync(&count, correct.get(), sizeof(count), cudaMemcpyDeviceToHost, stream.get()));
    check(cudaStreamSynchronize(stream.get()));

    const double percent = 100.0 * count / static_cast<double>(testing.row_count());
    std::printf("test accuracy: %.1f %%\n", percent);
    if (percent >= required_percent) return 0;
    std::fprintf(stderr, "train_cuda: expected a test accuracy of at least %.0f %%\n", required_percent);
    return 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "train_cuda: %s\n", error.what());
    return 1;
}
