#include <cstdint>
#include <iostream>

#include "pinflow/pinflow.hpp"

// Stands for a training step, which would launch kernels on these addresses of the device.
void train_step(const std::uint8_t* images, const std::uint8_t* labels, std::uint64_t count,
                pinflow::stream_view stream) {
    stream.host_function_async([=] {
        std::cout << count << " images at " << static_cast<const void*>(images) << ", labels at "
                  << static_cast<const void*>(labels) << '\n';
    });
}

void train(const char* images_path, const char* labels_path) {
    pinflow::install_fault_guard();  // the CPU may copy rows from the mapping; otherwise it uses pread
    const pinflow::array images = pinflow::open_npy(images_path);  // reads the header, maps the rest
    const pinflow::array labels = pinflow::open_npy(labels_path);
    pinflow::loader loader({images, labels},
                           {.batch_rows = 128, .order = pinflow::order::shuffled, .epochs = 2});
    const pinflow::stream stream(loader.device());  // of the first GPU, or of the host if there is none
    while (auto batch = loader.next(stream)) {      // work enqueued on `stream` from here on sees the data
        const auto* pixels = (*batch)[0].as<std::uint8_t>();  // throws if the elements have another type
        const auto* classes = (*batch)[1].as<std::uint8_t>();
        train_step(pixels, classes, batch->row_count(), stream);
    }  // the slot is filled again when the step has finished
    stream.synchronize();
    std::cout << loader.report().rows << " rows on " << loader.device().name() << '\n';
}

int main(int argc, char** argv) try {
    if (argc != 3) throw pinflow::invalid_argument("usage: stream_to_device IMAGES.npy LABELS.npy");
    train(argv[1], argv[2]);
} catch (const pinflow::error& error) {
    std::cerr << error.what() << '\n';
    return 1;
}
