// link_speed [FILE]
//
// Measures how fast this machine moves bytes to the first CUDA device and back, through pinflow's own device
// layer. Streaming figures are compared with this. FILE, some GiB of any content, is also registered in place
// and copied from. Also measures the digest of device memory. Prints one "name value unit" a line; exit 77
// without a CUDA device.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "pinflow/pin.hpp"
#include "pinflow/pinflow.hpp"
#include "src/device/backend.hpp"

namespace {

using namespace pinflow;

constexpr std::uint64_t kibibyte = 1024;
constexpr std::uint64_t mebibyte = 1024 * kibibyte;

/// The median seconds of several runs of `work`, which must wait for what it enqueues.
template <typename Work>
double median_seconds(int runs, Work work) {
    work();
    std::vector<double> seconds;
    for (int i = 0; i < runs; ++i) {
        const auto start = std::chrono::steady_clock::now();
        work();
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::ranges::sort(seconds);
    return seconds[seconds.size() / 2];
}

void print(const std::string& name, double value, const char* unit) {
    std::printf("%-40s %10.2f %s\n", name.c_str(), value, unit);
    std::fflush(stdout);
}

void print_rate(const std::string& name, std::uint64_t size_bytes, double seconds) {
    print(name, static_cast<double>(size_bytes) / seconds / 1e9, "GB/s");
}

void measure_copies(const device& gpu) {
    const stream back(gpu);
    const stream stream(gpu);
    constexpr std::uint64_t size = 256 * mebibyte;
    const pinned_buffer host(size, gpu);
    const pinned_buffer host_back(size, gpu);
    const device_buffer memory(size, stream);
    const device_buffer memory_back(size, stream);
    stream.synchronize();
    print_rate("LINK host to device, pinned, 256 MiB", size, median_seconds(9, [&] {
                   copy_to_device_async(memory.data(), host.bytes(), stream);
                   stream.synchronize();
               }));
    print_rate("device to host, pinned, 256 MiB", size, median_seconds(9, [&] {
                   copy_to_host_async(host.bytes(), memory.data(), stream);
                   stream.synchronize();
               }));
    print_rate("both ways at once, each", size, median_seconds(9, [&] {
                   copy_to_device_async(memory.data(), host.bytes(), stream);
                   copy_to_host_async(host_back.bytes(), memory_back.data(), back);
                   stream.synchronize();
                   back.synchronize();
               }));
    event done(gpu);
    for (const std::uint64_t piece : {16 * mebibyte, mebibyte, 64 * kibibyte}) {
        print_rate("host to device, each waited for, " + std::to_string(piece / kibibyte) + " KiB", piece,
                   median_seconds(101, [&] {
                       copy_to_device_async(memory.data(), host.bytes().first(piece), stream);
                       done.record(stream);
                       done.synchronize();
                   }));
    }
    print("record an event and wait for it",
          1e6 * median_seconds(501,
                               [&] {
                                   done.record(stream);
                                   done.synchronize();
                               }),
          "us");
    print("a host function, and wait for it",
          1e6 * median_seconds(101,
                               [&] {
                                   stream.host_function_async([] {});
                                   stream.synchronize();
                               }),
          "us");
}

void measure_file(const device& gpu, const std::string& path) {
    constexpr std::uint64_t row = 256 * kibibyte;
    constexpr std::uint64_t batch = 64;
    const auto file = std::make_shared<input_file>(path);
    const auto mapped = std::make_shared<mapped_file>(file, 0, file->size_bytes());
    const pinned_pages pages({{mapped->bytes(), "'" + path + "'", mapped}}, gpu);
    pages.require();
    const pin_report report = pages.report();
    std::printf("%s\n", report.reason.c_str());
    print_rate("register the file in place", report.registered_bytes,
               std::chrono::duration<double>(report.duration).count());

    const stream first(gpu);
    const stream second(gpu);
    const device_buffer slots[2] = {device_buffer(batch * row, first), device_buffer(batch * row, second)};
    const stream* const streams[2] = {&first, &second};
    const std::uint64_t batches = file->size_bytes() / (batch * row);
    const auto finish = [&] {
        first.synchronize();
        second.synchronize();
    };
    print_rate("stream the file, two streams, 16 MiB", batches * batch * row, median_seconds(3, [&] {
                   for (std::uint64_t i = 0; i < batches; ++i) {
                       copy_to_device_async(slots[i % 2].data(),
                                            mapped->bytes().subspan(i * batch * row, batch * row),
                                            *streams[i % 2]);
                   }
                   finish();
               }));
    std::vector<std::uint64_t> ids(batches * batch);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = i;
    }
    std::mt19937_64 random(1);
    std::shuffle(ids.begin(), ids.end(), random);
    print_rate("shuffled batches of 64 rows of 256 KiB", batches * batch * row, median_seconds(3, [&] {
                   std::vector<copy_range> ranges(batch);
                   for (std::uint64_t i = 0; i < batches; ++i) {
                       for (std::uint64_t j = 0; j < batch; ++j) {
                           ranges[j] = {slots[i % 2].data() + j * row,
                                        mapped->data() + ids[i * batch + j] * row, row};
                       }
                       copy_batch_to_device_async(ranges, *streams[i % 2]);
                   }
                   finish();
               }));
}

void measure_digest(const device& gpu) {
    const stream stream(gpu);
    constexpr std::uint64_t size = 1024 * mebibyte;
    const device_buffer memory(size, stream);
    const device_buffer sum(sizeof(std::uint64_t), stream);
    auto* const word = reinterpret_cast<std::uint64_t*>(sum.data());
    void* const handle = stream.view().native_handle();
    struct shape {
        std::uint64_t row_size_bytes;
        std::uint64_t rows;
        const char* name;
    };
    for (const shape& shape : {shape{256 * kibibyte, 64, "digest, 64 rows of 256 KiB"},
                               shape{256 * kibibyte, 4096, "digest, 4096 rows of 256 KiB"},
                               shape{256 * kibibyte - 1, 4096, "digest, 4096 rows of 262143 bytes"},
                               shape{784, 1'000'000, "digest, a million rows of 784 bytes"},
                               shape{12, 10'000'000, "digest, ten million rows of 12 bytes"},
                               shape{size, 1, "digest, one row of 1 GiB"}}) {
        const detail::digest_array array{memory.data(), shape.row_size_bytes};
        print_rate(shape.name, shape.row_size_bytes * shape.rows, median_seconds(9, [&] {
                       gpu.backend().add_digest({&array, 1}, shape.rows, word, handle);
                       stream.synchronize();
                   }));
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (device::cuda_count() == 0) {
        std::printf("skipped: %s\n", device::no_cuda_reason().c_str());
        return 77;
    }
    try {
        const device gpu = device::cuda(0);
        std::printf("%s: %s\n", gpu.name().c_str(), gpu.model().c_str());
        measure_copies(gpu);
        if (argc > 1) measure_file(gpu, argv[1]);
        measure_digest(gpu);
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "link_speed: error: %s\n", failure.what());
        return 1;
    }
    return 0;
}
