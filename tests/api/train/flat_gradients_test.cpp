#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "devices.hpp"
#include "flat_models.hpp"
#include "pinflow/error.hpp"

using namespace pinflow;

TEST_CASE("flat parameters: clip_norm scales the gradients of one step, and leaves those in memory") {
    for (const std::uint64_t length : {100'003U, 5'000'003U}) {
        std::vector<double> norms;
        const auto run = [&](const device& device) {
            CAPTURE(length);
            const stream stream(device);
            const std::vector<parameter_spec> specs{{"a", dtype::of<float>(), {length}},
                                                    {"b", dtype::of<float>(), {5}}};
            flat_parameters flat(specs, {sgd{.rate = 1}}, stream);
            const auto a = random_values(length, 1);
            const auto b = random_values(5, 2);
            put(flat.gradient(0), a, stream);
            put(flat.gradient(1), b, stream);
            double squares = 0;
            for (const auto* const values : {&a, &b}) {
                for (const float value : *values)
                    squares += static_cast<double>(value) * static_cast<double>(value);
            }
            const double norm = std::sqrt(squares);

            flat.clip_norm(norm / 4);
            flat.step_async(stream);
            norms.push_back(flat.read_progress(stream).norm);
            CHECK(norms.back() == doctest::Approx(norm).epsilon(1e-12));
            CHECK(norms.back() == norms.front());  // the same bits in every run and on every device
            CHECK(same_bits(values_of<float>(flat.gradient(0), a.size(), stream), a));
            const auto after = values_of<float>(flat.parameter(1), 5, stream);
            for (std::size_t i = 0; i < 5; ++i)
                CHECK(after[i] == doctest::Approx(-b[i] / 4).epsilon(1e-6));

            // the next step is not clipped, and neither is one with a smaller norm
            flat.step_async(stream);
            const auto whole = values_of<float>(flat.parameter(1), 5, stream);
            for (std::size_t i = 0; i < 5; ++i)
                CHECK(whole[i] == after[i] - b[i]);
            flat.clip_norm(2 * norm);
            flat.step_async(stream);
            const auto unclipped = values_of<float>(flat.parameter(1), 5, stream);
            for (std::size_t i = 0; i < 5; ++i)
                CHECK(unclipped[i] == whole[i] - b[i]);
        };
        on_each_device(run);
        on_each_device(run);
    }
}

TEST_CASE("flat parameters: clip_value limits each element in one step") {
    on_each_device([](const device& device) {
        const stream stream(device);
        flat_parameters flat = one_parameter<float>(4, sgd{.rate = 1}, stream);
        put(flat.gradient(0), std::vector<float>{-3, -0.5, 0.5, 3}, stream);
        flat.clip_value(1);
        flat.step_async(stream);
        CHECK(values_of<float>(flat.parameter(0), 4, stream) == std::vector<float>{1, 0.5, -0.5, -1});
        flat.step_async(stream);
        CHECK(values_of<float>(flat.parameter(0), 4, stream) == std::vector<float>{4, 1, -1, -4});
    });
}

TEST_CASE("flat parameters: a step with gradients that are not finite is made, skipped or refused") {
    on_each_device([](const device& device) {
        for (const float bad :
             {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
              std::numeric_limits<float>::quiet_NaN()}) {
            for (const nonfinite_gradients policy :
                 {nonfinite_gradients::update, nonfinite_gradients::skip, nonfinite_gradients::refuse}) {
                for (const bool clips : {false, true}) {
                    CAPTURE(bad);
                    CAPTURE(static_cast<int>(policy));
                    CAPTURE(clips);
                    const stream stream(device);
                    flat_parameters flat =
                        one_parameter<float>(70'000, adam{}, stream, {.nonfinite = policy});
                    std::vector<float> gradients(70'000, 1);
                    put(flat.gradient(0), gradients, stream);
                    flat.step_async(stream);
                    const auto before = values_of<float>(flat.parameter(0), 70'000, stream);
                    const auto state = values_of<float>(flat.state(0, 1), 70'000, stream);
                    flat.check(stream);

                    gradients[69'999] = bad;
                    put(flat.gradient(0), gradients, stream);
                    if (clips) flat.clip_norm(1);
                    flat.step_async(stream);
                    const auto after = values_of<float>(flat.parameter(0), 70'000, stream);
                    const auto progress = flat.read_progress(stream);
                    if (policy == nonfinite_gradients::update) {
                        CHECK(std::isnan(after.back()));
                        CHECK(progress.steps == 2);
                        flat.check(stream);
                        continue;
                    }
                    CHECK(same_bits(after, before));
                    CHECK(same_bits(values_of<float>(flat.state(0, 1), 70'000, stream), state));
                    CHECK(progress.steps == 1);
                    CHECK(progress.skipped == 1);
                    if (policy == nonfinite_gradients::refuse) CHECK_THROWS_AS(flat.check(stream), error);
                    if (policy == nonfinite_gradients::skip) flat.check(stream);

                    // the step after it is the second one
                    put(flat.gradient(0), std::vector<float>(70'000, 1), stream);
                    flat.step_async(stream);
                    CHECK(flat.read_progress(stream).steps == 2);
                    CHECK_FALSE(same_bits(values_of<float>(flat.parameter(0), 70'000, stream), before));
                }
            }
        }
    });
}

TEST_CASE("flat parameters: finite gradients whose norm is infinite do not skip a step") {
    on_each_device([](const device& device) {
        const stream stream(device);
        flat_parameters flat =
            one_parameter<double>(9000, sgd{.rate = 1}, stream, {.nonfinite = nonfinite_gradients::skip});
        put(flat.gradient(0), std::vector<double>(9000, 1e200), stream);
        flat.step_async(stream);
        CHECK(values_of<double>(flat.parameter(0), 9000, stream) == std::vector<double>(9000, -1e200));
        CHECK(std::isinf(flat.read_progress(stream).norm));
        CHECK(flat.read_progress(stream).steps == 1);
    });
}

TEST_CASE(
    "flat parameters: gradients are divided by the caller's scale, and the caller's `found` skips a step") {
    on_each_device([](const device& device) {
        const stream stream(device);
        flat_parameters flat = one_parameter<float>(8, sgd{.rate = 1}, stream);
        const device_buffer numbers(512, stream);
        const auto* const scale = reinterpret_cast<const float*>(numbers.data());
        const auto* const found = reinterpret_cast<const float*>(numbers.data() + 256);
        put(numbers.data(), std::vector<float>{1024}, stream);
        put(numbers.data() + 256, std::vector<float>{0}, stream);
        flat.use_scale(scale, found);
        put(flat.gradient(0), std::vector<float>(8, 2048), stream);
        flat.clip_norm(100);
        flat.step_async(stream);
        CHECK(values_of<float>(flat.parameter(0), 8, stream) == std::vector<float>(8, -2));
        CHECK(flat.read_progress(stream).norm == doctest::Approx(2 * std::sqrt(8.0)));

        put(numbers.data() + 256, std::vector<float>{1}, stream);
        flat.step_async(stream);
        CHECK(values_of<float>(flat.parameter(0), 8, stream) == std::vector<float>(8, -2));
        CHECK(flat.read_progress(stream).skipped == 1);
        flat.use_scale(nullptr, nullptr);
        flat.step_async(stream);
        CHECK(values_of<float>(flat.parameter(0), 8, stream) == std::vector<float>(8, -2050));
    });
}

TEST_CASE("flat parameters: zeroing the gradients leaves the parameters") {
    on_each_device([](const device& device) {
        const stream stream(device);
        flat_parameters flat = one_parameter<float>(1000, sgd{}, stream);
        const auto values = random_values(1000, 3);
        put(flat.parameter(0), values, stream);
        put(flat.gradient(0), values, stream);
        flat.zero_gradients_async(stream);
        CHECK(same_bits(values_of<float>(flat.parameter(0), 1000, stream), values));
        CHECK(values_of<float>(flat.gradient(0), 1000, stream) == std::vector<float>(1000));
    });
}
