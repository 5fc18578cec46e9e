#include <iostream>

#include "pinflow/pinflow.hpp"

// Stands for a training step, which would launch kernels on these addresses of the device. Work is enqueued
// only.
void train_step(const pinflow::batch& batch, pinflow::stream_view stream) {
    stream.host_function_async(
        [rows = batch.row_count(), images = batch[0].data(), labels = batch[1].data()] {
            std::cout << rows << " images at " << images << ", labels at " << labels << '\n';
        });
}

int main(int argc, char** argv) try {
    if (argc != 3) throw pinflow::invalid_argument("usage: stream_to_device IMAGES.npy LABELS.npy");
    pinflow::install_fault_guard();  // the CPU may copy from mappings, whatever happens to their files
    const pinflow::array images = pinflow::open_npy(argv[1]);  // reads the header, maps the rest
    const pinflow::array labels = pinflow::open_npy(argv[2]);
    const pinflow::loader_options options{.batch_rows = 128, .order = pinflow::order::shuffled, .epochs = 2};
    pinflow::loader loader({images, labels}, options);  // on the first GPU, without one on the host
    pinflow::stream stream(loader.device());
    while (auto batch = loader.next(stream)) {  // what `stream` is given from here on sees the data
        train_step(*batch, stream);             // the lease ends here; the memory is reused after the step
    }
    stream.synchronize();
    const pinflow::loader_report report = loader.report();
    std::cout << report.rows << " rows on " << loader.device().name() << ": " << report.reason << '\n';
} catch (const pinflow::error& error) {
    std::cerr << error.what() << '\n';
    return 1;
}
