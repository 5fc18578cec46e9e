// Trains a softmax classifier on the handwritten digits of samples/data, through the loader: images and
// labels are two arrays of one sample, shuffled anew in each epoch. Fails if it recognises fewer than 94% of
// the held-out digits.
//
//     train_digits [FOLDER]        the folder with the four .npy files, samples/data by default

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

constexpr std::size_t pixel_count = 64;
constexpr std::size_t class_count = 10;
constexpr float learning_rate = 0.5F;
constexpr double required_percent = 94;

using scores = std::array<float, class_count>;

/// One linear layer under a softmax: a row of weights for each pixel, and one for the bias.
class classifier {
 public:
    /// The score of each class; the highest is the prediction.
    scores evaluate(const std::uint8_t* image) const {
        scores result = weights_[pixel_count];
        for (std::size_t p = 0; p < pixel_count; ++p) {
            for (std::size_t c = 0; c < class_count; ++c)
                result[c] += weights_[p][c] * brightness(image[p]);
        }
        return result;
    }

    /// One step down the gradient of the cross-entropy: `images` is (rows, 64), `labels` is (rows,).
    void step(std::span<const std::uint8_t> images, std::span<const std::uint8_t> labels) {
        auto next_weights = weights_;
        const float rate = learning_rate / static_cast<float>(labels.size());
        for (std::size_t row = 0; row < labels.size(); ++row) {
            const std::uint8_t* image = images.data() + row * pixel_count;
            scores error = evaluate(image);  // becomes probability minus truth, the loss's derivative
            const float top = *std::max_element(error.begin(), error.end());
            float sum = 0;
            for (float& e : error)
                sum += e = std::exp(e - top);
            for (float& e : error)
                e /= sum;
            error.at(labels[row]) -= 1;
            for (std::size_t c = 0; c < class_count; ++c) {
                const float change = rate * error[c];
                for (std::size_t p = 0; p < pixel_count; ++p)
                    next_weights[p][c] -= change * brightness(image[p]);
                next_weights[pixel_count][c] -= change;
            }
        }
        weights_ = next_weights;
    }

 private:
    static float brightness(std::uint8_t pixel) { return static_cast<float>(pixel) / 16; }

    std::array<scores, pixel_count + 1> weights_{};
};

pinflow::loader open_digits(const std::filesystem::path& folder, const std::string& part,
                            const pinflow::loader_options& options) {
    return pinflow::loader({pinflow::open_npy(folder / ("digits_" + part + "_images.npy")),
                            pinflow::open_npy(folder / ("digits_" + part + "_labels.npy"))},
                           options);
}

double seconds(std::chrono::nanoseconds duration) {
    return std::chrono::duration<double>(duration).count();
}

}  // namespace

int main(int argc, char** argv) try {
    const std::filesystem::path folder = argc > 1 ? argv[1] : "samples/data";
    pinflow::install_fault_guard();  // lets the CPU copy rows from mappings; otherwise it uses pread
    // This trainer computes on the CPU, so the batches are wanted in host memory, with or without a GPU.
    const pinflow::device host = pinflow::device::host();
    classifier model;

    const auto start = std::chrono::steady_clock::now();
    pinflow::loader training = open_digits(
        folder, "train",
        {.device = host, .batch_rows = 32, .order = pinflow::order::shuffled, .seed = 1, .epochs = 50});
    while (const auto batch = training.next()) {
        model.step(batch->on_host<std::uint8_t>(0), batch->on_host<std::uint8_t>(1));
    }
    const auto elapsed = std::chrono::steady_clock::now() - start;

    pinflow::loader testing = open_digits(folder, "test", {.device = host});
    std::uint64_t correct = 0;
    while (const auto batch = testing.next()) {
        const std::span<const std::uint8_t> images = batch->on_host<std::uint8_t>(0);
        const std::span<const std::uint8_t> labels = batch->on_host<std::uint8_t>(1);
        for (std::size_t row = 0; row < labels.size(); ++row) {
            const scores s = model.evaluate(images.data() + row * pixel_count);
            correct += std::max_element(s.begin(), s.end()) - s.begin() == labels[row] ? 1U : 0U;
        }
    }

    const pinflow::loader_report report = training.report();
    const auto waited = report.storage_wait + report.file_wait + report.cpu_wait + report.link_wait;
    std::printf(
        "trained %.3f s, of which %.3f s waiting for data (storage %.3f, files %.3f, CPU %.3f, link %.3f)\n",
        seconds(elapsed), seconds(waited), seconds(report.storage_wait), seconds(report.file_wait),
        seconds(report.cpu_wait), seconds(report.link_wait));
    const double percent = 100.0 * static_cast<double>(correct) / static_cast<double>(testing.row_count());
    std::printf("test accuracy: %.1f %%\n", percent);
    if (percent >= required_percent) return 0;
    std::fprintf(stderr, "train_digits: expected a test accuracy of at least %.0f %%\n", required_percent);
    return 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "train_digits: %s\n", error.what());
    return 1;
}
