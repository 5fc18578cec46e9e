// A training run that can be stopped at any step and resumed with the same result: a checkpoint holds the
// model and the loader's state, in one file, so that they always belong to the same step.
//
//     resume_training FOLDER CHECKPOINT STEPS
//
// Trains a linear regression from the digit images in FOLDER (samples/data) to their labels, for up to STEPS
// more steps. Resumes from CHECKPOINT if it exists, and writes it every 50 steps and at the end. Prints the
// model's checksum, which is the same for a finished run however often it was stopped.

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>

#include "pinflow/pinflow.hpp"

namespace {

constexpr std::size_t pixel_count = 64;
using model = std::array<float, pixel_count + 1>;  // the last one is the bias

/// One step of stochastic gradient descent on the squared error; the order of the rows matters.
void step(model& weights, const pinflow::batch& batch) {
    const std::uint8_t* images = batch.on_host<std::uint8_t>(0).data();
    const std::uint8_t* labels = batch.on_host<std::uint8_t>(1).data();
    for (std::uint64_t row = 0; row < batch.row_count(); ++row, images += pixel_count) {
        float error = weights[pixel_count] - static_cast<float>(labels[row]);
        for (std::size_t p = 0; p < pixel_count; ++p)
            error += weights[p] * static_cast<float>(images[p]) / 16;
        const float change = 0.002F * error;
        for (std::size_t p = 0; p < pixel_count; ++p)
            weights[p] -= change * static_cast<float>(images[p]) / 16;
        weights[pixel_count] -= change;
    }
}

/// Writes the model's bytes, then the state's text. The rename makes the file appear complete or not at all,
/// even if this program is killed. To survive a power failure, call fsync before the rename.
void save(const std::filesystem::path& path, const model& weights, const pinflow::loader_state& state) {
    const std::filesystem::path unfinished = path.string() + ".unfinished";
    std::ofstream file(unfinished, std::ios::binary);
    file.write(reinterpret_cast<const char*>(weights.data()), sizeof(model));
    file << state.to_json();
    file.close();
    if (!file) throw std::runtime_error("cannot write '" + unfinished.string() + "'");
    std::filesystem::rename(unfinished, path);
}

pinflow::loader_state restore(const std::filesystem::path& path, model& weights) {
    std::ifstream file(path, std::ios::binary);
    if (!file.read(reinterpret_cast<char*>(weights.data()), sizeof(model)))
        throw std::runtime_error("cannot read '" + path.string() + "'");
    const std::string state(std::istreambuf_iterator<char>(file), {});
    return pinflow::loader_state::from_json(state);
}

std::uint32_t checksum(const model& weights) {
    std::uint32_t sum = 0;
    for (const float weight : weights)
        sum = sum * 31 + std::bit_cast<std::uint32_t>(weight);
    return sum;
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 4) {
        std::fprintf(stderr, "usage: resume_training FOLDER CHECKPOINT STEPS\n");
        return 2;
    }
    pinflow::install_fault_guard();  // lets the CPU copy rows from mappings; otherwise it uses pread
    const std::filesystem::path folder = argv[1], checkpoint = argv[2];
    const std::uint64_t max_steps = std::strtoull(argv[3], nullptr, 10);
    model weights{};
    std::optional<pinflow::loader_state> state;
    if (std::filesystem::exists(checkpoint)) state = restore(checkpoint, weights);

    pinflow::loader loader({pinflow::open_npy(folder / "digits_train_images.npy"),
                            pinflow::open_npy(folder / "digits_train_labels.npy")},
                           {.device = pinflow::device::host(),  // where this model is
                            .batch_rows = 32,
                            .order = pinflow::order::shuffled,
                            .seed = 1,
                            .epochs = 5,
                            .resume_from = state});
    std::uint64_t steps = 0;
    for (; steps < max_steps; ++steps) {
        const auto batch = loader.next();
        if (!batch) break;
        step(weights, *batch);
        if (steps % 50 == 0) save(checkpoint, weights, batch->state());  // now and then, in case of a crash
    }
    save(checkpoint, weights, loader.state());
    std::printf("%s after %llu steps, checksum %08x\n", loader.next() ? "stopped" : "finished",
                static_cast<unsigned long long>(steps), checksum(weights));
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "resume_training: %s\n", error.what());
    return 1;
}
