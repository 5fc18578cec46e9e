#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/stream.hpp"
#include "src/cli/bench.hpp"
#include "src/cli/bench_words.hpp"
#include "src/cli/elapsed.hpp"
#include "src/cli/open.hpp"

namespace pinflow::cli {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::uint64_t kibibyte = 1024;
constexpr std::uint64_t mebibyte = 1024 * kibibyte;
constexpr std::uint64_t gibibyte = 1024 * mebibyte;

double rate(std::uint64_t size_bytes, double seconds) {
    return static_cast<double>(size_bytes) / seconds / 1e9;
}

/// The median seconds of `work` after a warm-up run. `work` must wait for what it enqueues.
template <typename Work>
double median_seconds(int repetitions, Work work) {
    work();
    std::vector<double> seconds;
    for (int i = 0; i < repetitions; ++i) {
        const auto start = clock::now();
        work();
        seconds.push_back(seconds_since(start));
    }
    return median(seconds);
}

/// A pinned and a device buffer for each direction, and a stream for each, to copy between them.
class copies {
 public:
    explicit copies(const device& device) : to_device_(device), to_host_(device) {
        for (pinned_buffer& each : host_)
            each = pinned_buffer(size_bytes, device);
        device_[0] = device_buffer(size_bytes, to_device_);
        device_[1] = device_buffer(size_bytes, to_host_);
        fill_with_words(host_[0].bytes(), 1);
        fill_with_words(host_[1].bytes(), 2);
        enqueue_to_device(size_bytes);
        copy_to_device_async(device_[1].data(), host_[1].bytes(), to_host_);
        synchronize();
    }

    static constexpr std::uint64_t size_bytes = 256 * mebibyte;

    void enqueue_to_device(std::uint64_t bytes) const {
        copy_to_device_async(device_[0].data(), host_[0].bytes().first(bytes), to_device_);
    }
    void enqueue_to_host(std::uint64_t bytes) const {
        copy_to_host_async(host_[1].bytes().first(bytes), device_[1].data(), to_host_);
    }
    void synchronize() const {
        to_device_.synchronize();
        to_host_.synchronize();
    }

 private:
    stream to_device_;
    stream to_host_;
    pinned_buffer host_[2];
    device_buffer device_[2];
};

}  // namespace

link_rates measure_link(const device& device) {
    const copies copies(device);
    link_rates link;
    link.to_device = rate(copies::size_bytes, median_seconds(9, [&] {
                              copies.enqueue_to_device(copies::size_bytes);
                              copies.synchronize();
                          }));
    link.to_host = rate(copies::size_bytes, median_seconds(9, [&] {
                            copies.enqueue_to_host(copies::size_bytes);
                            copies.synchronize();
                        }));
    return link;
}

void bench_copy(const bench_options& options, const link_rates& link, const bench_report& report) {
    const copies copies(options.device);
    const double both = median_seconds(9, [&] {
        copies.enqueue_to_device(copies::size_bytes);
        copies.enqueue_to_host(copies::size_bytes);
        copies.synchronize();
    });
    const double both_rate = rate(2 * copies::size_bytes, both);
    report({"copy, both directions at once, in total", both_rate, both_rate / link.to_device, both,
            "256 MiB each"});
    for (const std::uint64_t piece : {16 * mebibyte, mebibyte, 64 * kibibyte, 4 * kibibyte}) {
        const double seconds = median_seconds(101, [&] {
            copies.enqueue_to_device(piece);
            copies.synchronize();
        });
        report({fmt::format("copy to the device, {} KiB, waited for", piece / kibibyte), rate(piece, seconds),
                rate(piece, seconds) / link.to_device, seconds, ""});
    }
}

void bench_pin(const bench_options& options, const link_rates& /*link*/, const bench_report& report) {
    if (options.device.kind() == device_kind::host) {
        report({"pin", 0, 0, 0, "nothing is page-locked for the host device"});
        if (!options.file.empty()) static_cast<void>(open_source_rows(options.file, {}));
        return;
    }
    for (const std::uint64_t size_bytes : {gibibyte, 4 * gibibyte}) {
        std::vector<double> seconds;
        for (unsigned i = 0; i < options.repetitions; ++i) {
            const auto start = clock::now();
            const pinned_buffer memory(size_bytes, options.device);
            seconds.push_back(seconds_since(start));
        }
        report({fmt::format("pin, new memory, {} GiB", size_bytes / gibibyte),
                rate(size_bytes, median(seconds)), 0, median(seconds), "zeroed, page-locked"});
    }
    if (options.file.empty()) return;
    std::vector<double> seconds;
    pin_report pinned;
    for (unsigned i = 0; i < options.repetitions; ++i) {
        const auto rows = open_source_rows(options.file, {});
        const auto start = clock::now();
        const pinned_pages pages(pin_ranges(rows), options.device);
        pages.require();
        seconds.push_back(seconds_since(start));
        pinned = pages.report();
    }
    report({"pin, a file in place", rate(pinned.registered_bytes, median(seconds)), 0, median(seconds),
            pinned.reason});
}

}  // namespace pinflow::cli
