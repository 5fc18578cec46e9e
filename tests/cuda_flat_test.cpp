#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/train/flat_parameters.hpp"
#include "src/device/cuda/api.hpp"
#include "src/device/cuda/flat.hpp"
#include "tests/cuda_kernels.hpp"
#include "tests/support/flat_models.hpp"

// Flat parameters: what only a GPU can show. tests/api/train has the rest.

using namespace pinflow;

namespace {

/// Counts the CUDA calls made during its lifetime, by name.
class call_counter {
 public:
    std::map<std::string, int> calls() {
        const std::lock_guard lock(mutex_);
        return calls_;
    }

 private:
    std::mutex mutex_;
    std::map<std::string, int> calls_;
    detail::cuda::scoped_failure_hook hook_{[this](std::string_view call) {
        // the context is made current around each call
        if (call.starts_with("cuCtx")) return cudaSuccess;
        const std::lock_guard lock(mutex_);
        ++calls_[std::string(call)];
        return cudaSuccess;
    }};
};

using counts = std::map<std::string, int>;

/// `count` numbers of one of the four types, of magnitude 1 to 2.
std::vector<std::byte> random_numbers(const dtype& type, std::uint64_t count, std::mt19937_64& random) {
    std::vector<std::byte> bytes(count * type.size_bytes());
    const bool is_bfloat16 = type.kind() == dtype_kind::bfloat16;
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t bits = random();
        std::byte* const to = bytes.data() + i * type.size_bytes();
        const double number = (bits % 2 == 0 ? 1 : -1) * (1 + static_cast<double>(bits >> 12) / 0x1p52);
        if (type.size_bytes() == 8) {
            std::memcpy(to, &number, 8);
        } else if (type.size_bytes() == 4) {
            const auto single = static_cast<float>(number);
            std::memcpy(to, &single, 4);
        } else {
            const auto half = static_cast<std::uint16_t>((is_bfloat16 ? 0x3F80 : 0x3C00) |
                                                         (bits & (is_bfloat16 ? 0x807F : 0x83FF)));
            std::memcpy(to, &half, 2);
        }
    }
    return bytes;
}

}  // namespace

TEST_CASE("cuda flat: a step is one kernel, and two with a norm or with a check of the gradients") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    int architecture = 0;
    REQUIRE(detail::cuda::load_kernel(detail::cuda::check_flat(), &architecture) == cudaSuccess);
    const std::string launch = architecture >= 90 ? "cudaLaunchKernelExC" : "cudaLaunchKernel";
    std::vector<parameter_spec> specs;
    for (std::size_t i = 0; i < 1000; ++i)
        specs.push_back(
            {std::to_string(i), i % 2 == 0 ? dtype::of<float>() : dtype::parse("bfloat16"), {i}, i % 3});
    for (const nonfinite_gradients policy : {nonfinite_gradients::update, nonfinite_gradients::skip}) {
        flat_parameters flat(specs, {adamw{}, adamw{.rate = 1}, adamw{}}, stream, {.nonfinite = policy});
        stream.synchronize();
        {
            call_counter counter;
            flat.step_async(stream);
            CHECK(counter.calls() == counts{{launch, policy == nonfinite_gradients::update ? 1 : 2}});
        }
        call_counter counter;
        flat.clip_norm(1);
        flat.step_async(stream);
        CHECK(counter.calls() == counts{{launch, 2}});
    }
}

TEST_CASE("cuda flat: steps and norms in both directions have the bits of the host") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const device host = device::host();
    const pinflow::stream host_stream(host);
    // more packs than threads; a step passes through the buffers in the direction of its check if they are
    // small (400,003), and in the opposite direction if they are large
    for (const std::uint64_t length : {400'003U, 2'000'003U}) {
        std::vector<parameter_spec> specs;
        for (const char* const type : {"<f4", "bfloat16", "<f2", "<f8"}) {
            for (const std::size_t group : {0U, 1U}) {
                const std::string name = std::string(type) + std::to_string(group);
                specs.push_back({name, dtype::parse(type), {length - group}, group});
            }
        }
        const std::vector<optimizer> groups{adam{.rate = 0.125}, adam{.rate = 0.5}};
        for (const bool clips : {false, true}) {
            CAPTURE(length);
            CAPTURE(clips);
            flat_parameters on_gpu(specs, groups, stream, {.master_copies = true});
            flat_parameters on_host(specs, groups, host_stream, {.master_copies = true});
            std::mt19937_64 random(length);
            for (int step = 0; step < 4; ++step) {
                for (std::size_t i = 0; step % 2 == 0 && i < specs.size(); ++i) {
                    const auto numbers = random_numbers(specs[i].dtype, specs[i].shape[0], random);
                    put(on_gpu.gradient(i), numbers, stream);
                    put(on_host.gradient(i), numbers, host_stream);
                }
                if (clips) {
                    on_gpu.clip_norm(2);
                    on_host.clip_norm(2);
                }
                on_gpu.step_async(stream);
                on_host.step_async(host_stream);
                if (step == 2) continue;  // the next step follows at once
                CHECK(on_gpu.read_progress(stream).norm == on_host.read_progress(host_stream).norm);
            }
            for (std::size_t i = 0; i < specs.size(); ++i) {
                const std::uint64_t size_bytes = specs[i].shape[0] * specs[i].dtype.size_bytes();
                CHECK(same_bits(values_of<std::byte>(on_gpu.parameter(i), size_bytes, stream),
                                values_of<std::byte>(on_host.parameter(i), size_bytes, host_stream)));
            }
        }
    }
}

TEST_CASE(
    "cuda flat: a gradient that is not a number is found in first, middle and last place, in both "
    "directions") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    constexpr std::uint64_t count = 1'300'001;
    auto flat = one_parameter<float>(count, sgd{}, stream, {.nonfinite = nonfinite_gradients::skip});
    std::uint64_t skipped = 0;
    for (const std::uint64_t place : {std::uint64_t{0}, count / 2, count - 1}) {
        for (int step = 0; step < 2; ++step) {
            put(flat.gradient(0) + place * 4, std::vector<float>{NAN}, stream);
            flat.step_async(stream);
            CHECK(flat.read_progress(stream).skipped == ++skipped);
            put(flat.gradient(0) + place * 4, std::vector<float>{1}, stream);
            flat.step_async(stream);
            // Each step of buffers this small reverses the direction. Without a third step, both NaNs would
            // be looked for from the same end.
            if (step == 0) flat.step_async(stream);
            CHECK(flat.read_progress(stream).skipped == skipped);
        }
    }
}

TEST_CASE("cuda flat: a step waits for a kernel that lets it start early") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    for (const bool clips : {false, true}) {
        CAPTURE(clips);
        auto flat = one_parameter<float>(1000, sgd{.rate = 1}, stream);
        for (int step = 0; step < 4; ++step) {
            const auto gradient = static_cast<float>(step + 1);
            launch_late_store(reinterpret_cast<float*>(flat.gradient(0)), gradient, to_cuda(stream));
            if (clips) flat.clip_norm(100);
            flat.step_async(stream);
        }
        CHECK(values_of<float>(flat.parameter(0), 2, stream) == std::vector<float>{-10, 0});
    }
}

TEST_CASE("cuda flat: steps of a captured graph count, and take new rates") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const auto make = [&] {
        flat_parameters flat = one_parameter<float>(5000, adam{}, stream);
        put(flat.gradient(0), std::vector<float>(5000, 0.25F), stream);
        return flat;
    };
    flat_parameters captured = make();
    flat_parameters plain = make();
    const auto handle = to_cuda(stream);
    REQUIRE(::cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    for (int step = 0; step < 2; ++step) {
        captured.clip_norm(3);
        captured.step_async(stream);
    }
    cudaGraph_t graph = nullptr;
    REQUIRE(::cudaStreamEndCapture(handle, &graph) == cudaSuccess);
    cudaGraphExec_t executable = nullptr;
    REQUIRE(::cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
    for (int step = 0; step < 10; ++step) {
        if (step == 5) {
            captured.set_rate_async(0, 0.5, stream);
            plain.set_rate_async(0, 0.5, stream);
        }
        CHECK(::cudaGraphLaunch(executable, handle) == cudaSuccess);
        for (int each = 0; each < 2; ++each) {
            plain.clip_norm(3);
            plain.step_async(stream);
        }
    }
    CHECK(captured.read_progress(stream).steps == 20);
    CHECK(same_bits(values_of<float>(captured.parameter(0), 5000, stream),
                    values_of<float>(plain.parameter(0), 5000, stream)));
    CHECK(::cudaGraphExecDestroy(executable) == cudaSuccess);
    CHECK(::cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE("cuda flat: 2^31 + 1 elements are updated, in one tensor and in several") {
    const device gpu = device::cuda(0);
    constexpr std::uint64_t many = (std::uint64_t{1} << 31) + 1;
    if (gpu.memory().free_bytes < std::uint64_t{12} << 30) {
        MESSAGE("skipped: 12 GiB of device memory are not free");
        return;
    }
    const stream stream(gpu);
    const dtype type = dtype::parse("bfloat16");
    for (const bool one : {true, false}) {
        std::vector<parameter_spec> specs;
        if (one) {
            specs = {{"w", type, {many}}};
        } else {
            specs = {{"a", type, {many / 2}}, {"empty", type, {0}}, {"b", type, {many - many / 2}}};
        }
        flat_parameters flat(specs, {sgd{.rate = 1}}, stream);
        // elements 0, 2^31 - 1 and 2^31: the first, and the last two
        const std::vector<std::uint16_t> minus_one{0xBF80};
        const auto last = specs.size() - 1;
        const std::uint64_t length = specs[last].shape[0];
        std::vector<std::pair<std::size_t, std::uint64_t>> places{
            {0, 0}, {last, length - 1}, {last, length - 2}};
        for (const auto& [parameter, element] : places)
            put(flat.gradient(parameter) + 2 * element, minus_one, stream);
        flat.clip_norm(100);
        flat.step_async(stream);
        flat.step_async(stream);  // in the other direction
        CHECK(flat.read_progress(stream).norm == doctest::Approx(std::sqrt(3.0)));
        for (const auto& [parameter, element] : places)
            CHECK(values_of<std::uint16_t>(flat.parameter(parameter) + 2 * element, 1, stream) ==
                  std::vector<std::uint16_t>{0x4000});
        CHECK(values_of<std::uint16_t>(flat.parameter(last) + length / 2 * 2, 1, stream) ==
              std::vector<std::uint16_t>{0});
    }
}
