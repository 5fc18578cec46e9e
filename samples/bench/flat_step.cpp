// flat_step [DEVICE]
//
// Measures steps of flat parameters on DEVICE (the default: the best one). Prints one "name value unit" a
// line. First comes the rate of a copy of 1 GiB on the device (2 x bytes / time; on the host by memcpy on all
// threads). Then come, for each model, the median times of a step of Adam that is waited for, of one after
// other memory was written (so that no cache has any of it), and of one of many enqueued back to back, and
// the time of clipping and step together, divided by that of a step. For rates a step counts 7 times the
// bytes of the parameters. The first step of the two smaller models is checked.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"
#include "pinflow/train/flat_parameters.hpp"
#include "src/device/backend.hpp"

namespace {

using namespace pinflow;
using clock_type = std::chrono::steady_clock;

constexpr std::uint64_t gib = std::uint64_t{1} << 30;
constexpr int rounds = 21;

double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
}

/// The median seconds of `work`, waited for; `before` is not timed.
template <typename Before, typename Work>
double waited(const pinflow::stream& stream, Before before, Work work) {
    std::vector<double> seconds;
    for (int round = 0; round < rounds + 3; ++round) {
        before();
        stream.synchronize();
        const auto start = clock_type::now();
        work();
        stream.synchronize();
        if (round >= 3) seconds.push_back(std::chrono::duration<double>(clock_type::now() - start).count());
    }
    return median(seconds);
}

/// The seconds of one of many calls of `work` that are enqueued one after the other.
template <typename Work>
double back_to_back(const pinflow::stream& stream, Work work) {
    std::vector<double> seconds;
    for (int round = 0; round < 5; ++round) {
        constexpr int calls = 200;
        work();
        stream.synchronize();
        const auto start = clock_type::now();
        for (int call = 0; call < calls; ++call)
            work();
        stream.synchronize();
        seconds.push_back(std::chrono::duration<double>(clock_type::now() - start).count() / calls);
    }
    return median(seconds);
}

void say(const std::string& name, double value, const char* unit) {
    std::printf("%-44s %10.4f %s\n", name.c_str(), value, unit);
    std::fflush(stdout);
}

/// Gradients of 1 make the first step of Adam -rate for every element.
void check_first_step(const pinflow::device& device, const pinflow::stream& stream, std::uint64_t count,
                      std::uint64_t size) {
    std::vector<parameter_spec> specs;
    for (std::uint64_t i = 0; i < count; ++i)
        specs.push_back({std::to_string(i), dtype::of<float>(), {size}});
    flat_parameters flat(specs, {adam{}}, stream);
    const std::vector<float> ones(size, 1.0F);
    for (std::size_t i = 0; i < count; ++i)
        copy_to_device_async(flat.gradient(i), std::as_bytes(std::span(ones)), stream);
    flat.step_async(stream);
    for (std::size_t i = 0; i < count; ++i) {
        std::vector<float> values(size);
        copy_to_host_async(std::as_writable_bytes(std::span(values)), flat.parameter(i), stream);
        stream.synchronize();
        if (!std::ranges::all_of(values, [](float value) { return std::abs(value + 1e-3F) < 1e-8F; }))
            throw std::runtime_error("a step on " + device.name() + " is wrong");
    }
}

/// The median seconds of a copy of 1 GiB.
double copy_seconds(const pinflow::device& device, const pinflow::stream& stream) {
    const device_buffer from(gib, stream);
    const device_buffer to(gib, stream);
    auto& backend = device.backend();
    backend.fill_zero(from.data(), gib, stream.view().native_handle());
    backend.fill_zero(to.data(), gib, stream.view().native_handle());
    if (device.kind() == device_kind::cuda)
        return waited(
            stream, [] {},
            [&] { backend.copy_on_device(to.data(), from.data(), gib, stream.view().native_handle()); });
    const std::uint64_t count = std::max(1U, std::thread::hardware_concurrency());
    return waited(
        stream, [] {},
        [&] {
            std::vector<std::thread> threads;
            for (std::uint64_t i = 0; i < count; ++i) {
                const std::uint64_t begin = gib / count * i;
                const std::uint64_t size = i + 1 == count ? gib - begin : gib / count;
                threads.emplace_back(
                    [&, begin, size] { std::memcpy(to.data() + begin, from.data() + begin, size); });
            }
            for (std::thread& thread : threads)
                thread.join();
        });
}

void measure(const pinflow::device& device, const pinflow::stream& stream, std::uint64_t count,
             std::uint64_t size) {
    const std::string model = std::to_string(count) + " x " + std::to_string(size);
    const double bytes = static_cast<double>(count * size * sizeof(float));
    if (count * size < gib / 16) check_first_step(device, stream, count, size);
    std::vector<parameter_spec> specs;
    for (std::uint64_t i = 0; i < count; ++i)
        specs.push_back({std::to_string(i), dtype::of<float>(), {size}});
    flat_parameters flat(specs, {adam{}}, stream);
    const device_buffer other(gib / 2, stream);
    auto& backend = device.backend();
    const auto step = [&] { flat.step_async(stream); };
    const auto clip_and_step = [&] {
        flat.clip_norm(1);
        flat.step_async(stream);
    };
    const auto nothing = [] {};
    const auto forget = [&] {
        backend.fill_zero(other.data(), other.size_bytes(), stream.view().native_handle());
    };
    const double warm = waited(stream, nothing, step);
    const double cold = waited(stream, forget, step);
    const double many = back_to_back(stream, step);
    const double clipped = back_to_back(stream, clip_and_step);
    say(model + ": waited for", warm * 1e3, "ms");
    say(model + ": waited for, cold", cold * 1e3, "ms");
    say(model + ": back to back", many * 1e3, "ms");
    say(model + ": back to back", 7 * bytes / many / 1e9, "GB/s");
    say(model + ": cold", 7 * bytes / cold / 1e9, "GB/s");
    say(model + ": clip and step / step", clipped / many, "");
}

}  // namespace

int main(int argc, char** argv) try {
    const pinflow::device device = argc > 1 ? pinflow::device::parse(argv[1]) : pinflow::device::best();
    const pinflow::stream stream(device);
    std::printf("%s, %s\n", device.name().c_str(), device.model().c_str());
    say("copy of 1 GiB", 2 * static_cast<double>(gib) / copy_seconds(device, stream) / 1e9, "GB/s");
    measure(device, stream, 1000, 4096);
    measure(device, stream, 160, 160'000);
    if (device.kind() == device_kind::cuda) measure(device, stream, 256, gib / 4 / 256);
    return 0;
} catch (const std::exception& failure) {
    std::fprintf(stderr, "flat_step: %s\n", failure.what());
    return 1;
}
