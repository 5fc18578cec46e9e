#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/train/flat_parameters.hpp"
#include "src/device/cuda/api.hpp"
#include "tests/support/flat_models.hpp"

// Flat parameters: what only a GPU can show. tests/api/train has the rest.

using namespace pinflow;

namespace {

/// Counts the CUDA calls made during its lifetime, by name; all that launch a kernel as "launch".
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
        ++calls_[call.starts_with("cudaLaunchKernel") ? "launch" : std::string(call)];
        return cudaSuccess;
    }};
};

using counts = std::map<std::string, int>;

}  // namespace

TEST_CASE("cuda flat: a step is one kernel, and two with a norm or with a check of the gradients") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
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
            CHECK(counter.calls() == counts{{"launch", policy == nonfinite_gradients::update ? 1 : 2}});
        }
        call_counter counter;
        flat.clip_norm(1);
        flat.step_async(stream);
        CHECK(counter.calls() == counts{{"launch", 2}});
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
