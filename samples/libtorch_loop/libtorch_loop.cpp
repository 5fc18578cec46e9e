// Trains a linear classifier of LibTorch on the handwritten digits of samples/data: each batch becomes two
// tensors without a copy, on a GPU if there is one. Fails if it recognises fewer than 94% of the held-out
// digits.
//
//     libtorch_loop [FOLDER]        the folder with the four .npy files, samples/data by default

#include <ATen/DLConvertor.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>

#include "pinflow/pinflow.hpp"

namespace {

using managed = pinflow::dlpack::managed_tensor;
static_assert(sizeof(managed) == sizeof(DLManagedTensor) &&
              offsetof(managed, manager_ctx) == offsetof(DLManagedTensor, manager_ctx) &&
              offsetof(managed, deleter) == offsetof(DLManagedTensor, deleter));
static_assert(offsetof(managed, dl_tensor.device) == offsetof(DLManagedTensor, dl_tensor.device) &&
              offsetof(managed, dl_tensor.ndim) == offsetof(DLManagedTensor, dl_tensor.ndim) &&
              offsetof(managed, dl_tensor.dtype) == offsetof(DLManagedTensor, dl_tensor.dtype) &&
              offsetof(managed, dl_tensor.shape) == offsetof(DLManagedTensor, dl_tensor.shape) &&
              offsetof(managed, dl_tensor.strides) == offsetof(DLManagedTensor, dl_tensor.strides) &&
              offsetof(managed, dl_tensor.byte_offset) == offsetof(DLManagedTensor, dl_tensor.byte_offset));

static_assert(sizeof(pinflow::dlpack::tensor) == sizeof(DLTensor) &&
              sizeof(pinflow::dlpack::device) == sizeof(DLDevice) &&
              sizeof(pinflow::dlpack::data_type) == sizeof(DLDataType) &&
              offsetof(pinflow::dlpack::device, device_id) == offsetof(DLDevice, device_id) &&
              offsetof(pinflow::dlpack::data_type, bits) == offsetof(DLDataType, bits) &&
              offsetof(pinflow::dlpack::data_type, lanes) == offsetof(DLDataType, lanes));
static_assert(static_cast<int>(pinflow::dlpack::device_type::cpu) == kDLCPU &&
              static_cast<int>(pinflow::dlpack::device_type::cuda) == kDLCUDA &&
              static_cast<int>(pinflow::dlpack::type_code::floating) == kDLFloat &&
              static_cast<int>(pinflow::dlpack::type_code::bfloat) == kDLBfloat &&
              static_cast<int>(pinflow::dlpack::type_code::complex) == kDLComplex);
#ifdef DLPACK_MAJOR_VERSION  // older LibTorch has no such structure
using versioned = pinflow::dlpack::managed_tensor_versioned;
static_assert(sizeof(versioned) == sizeof(DLManagedTensorVersioned) &&
              offsetof(versioned, manager_ctx) == offsetof(DLManagedTensorVersioned, manager_ctx) &&
              offsetof(versioned, deleter) == offsetof(DLManagedTensorVersioned, deleter) &&
              offsetof(versioned, flags) == offsetof(DLManagedTensorVersioned, flags) &&
              offsetof(versioned, dl_tensor) == offsetof(DLManagedTensorVersioned, dl_tensor));
#endif

constexpr double required_percent = 94;

/// The stream that LibTorch uses, unless a program sets another: CUDA's legacy default stream. None on the
/// CPU.
std::optional<pinflow::stream_view> torch_stream(const pinflow::device& device) {
    return pinflow::dlpack::consumer_stream(device);
}

/// Array `index` of a batch. The tensor holds the batch's slot until LibTorch has destroyed it.
torch::Tensor tensor_of(pinflow::batch& batch, std::size_t index) {
    auto tensor = pinflow::to_dlpack<managed>(batch, index);
    const torch::Tensor taken = at::fromDLPack(reinterpret_cast<DLManagedTensor*>(tensor.get()));
    tensor.release();  // LibTorch deletes it
    return taken;
}

std::optional<pinflow::batch> next(pinflow::loader& loader) {
    const auto stream = torch_stream(loader.device());
    return stream ? loader.next(*stream) : loader.next();
}

pinflow::loader open_digits(const std::filesystem::path& folder, const std::string& part,
                            const pinflow::loader_options& options) {
    return pinflow::loader({pinflow::open_npy(folder / ("digits_" + part + "_images.npy")),
                            pinflow::open_npy(folder / ("digits_" + part + "_labels.npy"))},
                           options);
}

torch::Tensor brightness(const torch::Tensor& images) {
    return images.flatten(1).to(torch::kFloat32).div(16);
}

}  // namespace

int main(int argc, char** argv) try {
    const std::filesystem::path folder = argc > 1 ? argv[1] : "samples/data";
    pinflow::install_fault_guard();
    const pinflow::device device =
        torch::cuda::is_available() ? pinflow::device::best() : pinflow::device::host();
    torch::manual_seed(1);
    torch::nn::Linear model(64, 10);
    model->to(device.kind() == pinflow::device_kind::host ? torch::Device(torch::kCPU)
                                                          : torch::Device(torch::kCUDA, device.index()));
    torch::optim::SGD optimizer(model->parameters(), 0.5);

    pinflow::loader training = open_digits(
        folder, "train",
        {.device = device, .batch_rows = 32, .order = pinflow::order::shuffled, .seed = 1, .epochs = 50});
    while (auto batch = next(training)) {
        const torch::Tensor images = tensor_of(*batch, 0);
        const torch::Tensor labels = tensor_of(*batch, 1);
        batch->release();  // the tensors hold the slot
        optimizer.zero_grad();
        const torch::Tensor loss =
            torch::nn::functional::cross_entropy(model(brightness(images)), labels.to(torch::kLong));
        loss.backward();
        optimizer.step();
    }

    const torch::NoGradGuard no_grad;
    pinflow::loader testing = open_digits(folder, "test", {.device = device});
    std::int64_t correct = 0;
    while (auto batch = next(testing)) {
        const torch::Tensor predicted = model(brightness(tensor_of(*batch, 0))).argmax(1);
        correct += predicted.eq(tensor_of(*batch, 1).to(torch::kLong)).sum().item<std::int64_t>();
    }
    const double percent = 100.0 * static_cast<double>(correct) / static_cast<double>(testing.row_count());
    std::printf("on %s, LibTorch %s: test accuracy: %.1f %%\n", device.name().c_str(), TORCH_VERSION,
                percent);
    if (percent >= required_percent) return 0;
    std::fprintf(stderr, "libtorch_loop: expected a test accuracy of at least %.0f %%\n", required_percent);
    return 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "libtorch_loop: %s\n", error.what());
    return 1;
}
