#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <ranges>
#include <vector>

#include "pinflow/pinflow.hpp"

// Loads the tensors of a model's files to the best device, shows some of them, and saves half of the largest.

namespace {

void show(const pinflow::device_tensor& tensor) {
    std::cout << tensor.name() << ' ' << tensor.dtype().descr() << ' ' << pinflow::to_string(tensor.shape())
              << " at " << static_cast<const void*>(tensor.data()) << '\n';
}

void load_all(const std::vector<std::filesystem::path>& files, const pinflow::device& device) {
    pinflow::load_options options;
    options.progress = [](std::uint64_t done, std::uint64_t total) {
        std::cerr << done * 100 / std::max<std::uint64_t>(total, 1) << " %\n";
    };
    const pinflow::loaded_tensors model = pinflow::load_tensors(files, device, options);
    for (const auto& tensor : model.tensors | std::views::take(3))
        show(tensor);
    const double seconds = std::chrono::duration<double>(model.report.duration).count();
    std::cout << model.tensors.size() << " tensors, "
              << static_cast<double>(model.report.size_bytes) / 1e9 / seconds << " GB/s on " << device.name()
              << " (" << model.report.reason << ")\n";
}

/// Loads and saves the second half of the rows of the largest tensor, as the second of two ranks would load
/// it.
void load_half(const std::vector<std::filesystem::path>& files, const pinflow::device& device) {
    const pinflow::tensor_files model(files);  // reads the headers
    const auto& tensors = model.tensors();
    const auto largest = std::ranges::max_element(tensors, {}, &pinflow::tensor_description::size_bytes);
    if (largest == tensors.end() || largest->shape.empty()) return;
    const std::uint64_t rows = largest->shape[0];
    const pinflow::tensor_request request{largest->name, pinflow::tensor_slice{0, rows / 2, rows}};
    const pinflow::loaded_tensors part = model.load({&request, 1}, device);
    show(part.tensors[0]);
    const auto& half = part.tensors[0];
    const pinflow::tensor_to_save saved{half.name(), half.dtype(), half.shape(), half.data()};
    pinflow::save_tensors("half.safetensors", {&saved, 1}, pinflow::stream(device));
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc < 2) throw pinflow::invalid_argument("usage: load_model FILE...");
    const std::vector<std::filesystem::path> files(argv + 1, argv + argc);
    const pinflow::device device = pinflow::device::best();
    load_all(files, device);
    load_half(files, device);
} catch (const pinflow::error& error) {
    std::cerr << error.what() << '\n';
    return 1;
}
