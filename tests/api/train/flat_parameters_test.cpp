#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "counting_resource.hpp"
#include "devices.hpp"
#include "flat_models.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "sanitized.hpp"

using namespace pinflow;

namespace {

const dtype float16 = dtype::parse("<f2");
const dtype bfloat16 = dtype::parse("bfloat16");

std::vector<float> from_bfloat16(const std::vector<std::uint16_t>& halves) {
    std::vector<float> values;
    for (const std::uint16_t half : halves) {
        const std::uint32_t bits = std::uint32_t{half} << 16;
        float value = 0;
        std::memcpy(&value, &bits, sizeof value);
        values.push_back(value);
    }
    return values;
}

/// One step of one float32 parameter by itself.
std::vector<float> stepped(const device& device, const optimizer& settings, const std::vector<float>& values,
                           const std::vector<float>& gradients) {
    const stream stream(device);
    flat_parameters flat = one_parameter<float>(values.size(), settings, stream);
    put(flat.parameter(0), values, stream);
    put(flat.gradient(0), gradients, stream);
    flat.step_async(stream);
    return values_of<float>(flat.parameter(0), values.size(), stream);
}

}  // namespace

TEST_CASE("flat parameters: views begin at multiples of 256 bytes, and do not overlap") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const std::vector<parameter_spec> specs{{"a", dtype::of<float>(), {3, 5}},
                                                {"empty", dtype::of<float>(), {0, 7}},
                                                {"b", float16, {129}, 1},
                                                {"scalar", dtype::of<double>(), {}},
                                                {"c", bfloat16, {128}},
                                                {"d", dtype::of<float>(), {64}, 1}};
        const flat_parameters flat(specs, {adam{}, adam{.rate = 1}}, stream);
        CHECK(flat.device() == device);
        CHECK(flat.state_names() == std::vector<std::string>{"exp_avg", "exp_avg_sq"});
        std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
        for (std::size_t i = 0; i < specs.size(); ++i) {
            CHECK(flat.index_of(specs[i].name) == i);
            std::uint64_t count = 1;
            for (const std::uint64_t length : specs[i].shape)
                count *= length;
            const std::uint64_t state_bytes = count * (specs[i].dtype == dtype::of<double>() ? 8 : 4);
            for (const auto& [data, size_bytes] :
                 {std::pair(flat.parameter(i), count * specs[i].dtype.size_bytes()),
                  {flat.gradient(i), count * specs[i].dtype.size_bytes()},
                  {flat.state(i, 0), state_bytes},
                  {flat.state(i, 1), state_bytes}}) {
                const auto begin = reinterpret_cast<std::uintptr_t>(data);
                REQUIRE(data != nullptr);
                CHECK(begin % 256 == 0);
                for (const auto& [other, end] : ranges)
                    CHECK((begin + size_bytes <= other || begin >= end));
                if (size_bytes > 0) ranges.emplace_back(begin, begin + size_bytes);
            }
            CHECK(flat.parameter(i) >= flat.parameter_buffer());
            CHECK(flat.gradient(i) >= flat.gradient_buffer());
        }
        CHECK(values_of<float>(flat.parameter(0), 15, stream) == std::vector<float>(15));
        CHECK(values_of<float>(flat.gradient(0), 15, stream) == std::vector<float>(15));
    });
}

TEST_CASE("flat parameters: 2^31 + 1 elements of a tensor beside others are updated on the host") {
    // on a GPU, cuda_flat_test.cpp does the same
    constexpr std::uint64_t many = (std::uint64_t{1} << 31) + 1;
    const device host = device::host();
    if (sanitized || host.memory().free_bytes < std::uint64_t{14} << 30) {
        MESSAGE("skipped: 14 GiB of memory are not free, or a sanitizer runs");
        return;
    }
    const stream stream(host);
    flat_parameters flat({{"empty", bfloat16, {0}}, {"w", bfloat16, {many}}, {"b", bfloat16, {3}}},
                         {sgd{.rate = 1}}, stream);
    const std::vector<std::uint16_t> minus_one{0xBF80};
    const std::vector<std::pair<std::size_t, std::uint64_t>> places{
        {1, 0}, {1, many - 1}, {1, many - 2}, {2, 2}};
    for (const auto& [parameter, element] : places)
        put(flat.gradient(parameter) + 2 * element, minus_one, stream);
    flat.step_async(stream);
    for (const auto& [parameter, element] : places)
        CHECK(values_of<std::uint16_t>(flat.parameter(parameter) + 2 * element, 1, stream) ==
              std::vector<std::uint16_t>{0x3F80});
    CHECK(values_of<std::uint16_t>(flat.parameter(1) + many / 2 * 2, 1, stream) ==
          std::vector<std::uint16_t>{0});
}

TEST_CASE("flat parameters: first values come from device memory, and from tensors of other libraries") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const auto weights = random_values(300, 1);
        const auto bias = random_values(5, 2);
        flat_parameters source({{"w", dtype::of<float>(), {10, 30}}, {"b", dtype::of<float>(), {5}}}, {sgd{}},
                               stream);
        put(source.parameter(0), weights, stream);
        put(source.parameter(1), bias, stream);
        const foreign_tensor tensor(to_dlpack(source, 0, flat_view::parameter).release());
        const flat_parameters flat({to_parameter("w", tensor, 1),
                                    {"b", dtype::of<float>(), {5}, 0, source.parameter(1)},
                                    {"zero", dtype::of<float>(), {3}},
                                    {"none", dtype::of<float>(), {0}, 0, source.parameter(1)}},
                                   {adam{}, adam{.rate = 1}}, stream);
        CHECK(flat.parameters()[0].shape == shape_vector{10, 30});
        CHECK(flat.parameters()[0].group == 1);
        CHECK(flat.parameters()[1].values == nullptr);
        CHECK(values_of<float>(flat.parameter(0), 300, stream) == weights);
        CHECK(values_of<float>(flat.parameter(1), 5, stream) == bias);
        CHECK(values_of<float>(flat.parameter(2), 3, stream) == std::vector<float>(3));
    });
}

TEST_CASE("flat parameters: a step of many parameters is that of each by itself, whatever their sizes") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const std::vector<optimizer> groups{adamw{.rate = 0.1}, adamw{.rate = 0.01, .weight_decay = 0.5}};
        std::vector<parameter_spec> specs;
        for (const std::uint64_t size : {0U, 1U, 3U, 4U, 5U, 63U, 64U, 65U, 1000U, 0U, 4096U, 100'003U, 0U})
            specs.push_back({std::to_string(specs.size()), dtype::of<float>(), {size}, specs.size() % 2});
        flat_parameters flat(specs, groups, stream);
        for (unsigned i = 0; i < specs.size(); ++i) {
            put(flat.parameter(i), random_values(specs[i].shape[0], 2 * i), stream);
            put(flat.gradient(i), random_values(specs[i].shape[0], 2 * i + 1), stream);
        }
        flat.step_async(stream);
        for (unsigned i = 0; i < specs.size(); ++i) {
            CAPTURE(specs[i].shape[0]);
            const std::uint64_t size = specs[i].shape[0];
            const auto alone =
                stepped(device, groups[i % 2], random_values(size, 2 * i), random_values(size, 2 * i + 1));
            CHECK(same_bits(values_of<float>(flat.parameter(i), size, stream), alone));
        }
    });
}

TEST_CASE("flat parameters: 5,000 parameters of every type are updated") {
    on_each_device([](const device& device) {
        const stream stream(device);
        std::vector<parameter_spec> specs;
        for (std::size_t i = 0; i < 5000; ++i) {
            const dtype type = i % 4 == 0   ? dtype::of<float>()
                               : i % 4 == 1 ? dtype::of<double>()
                               : i % 4 == 2 ? float16
                                            : bfloat16;
            specs.push_back({std::to_string(i), type, {i % 7}, i % 3});
        }
        flat_parameters flat(specs, {sgd{.rate = 1}, sgd{.rate = 2}, sgd{.rate = 4}}, stream);
        for (std::size_t i = 0; i < specs.size(); ++i) {
            const std::uint64_t count = i % 7;
            if (i % 4 == 0) put(flat.gradient(i), std::vector<float>(count, -1), stream);
            if (i % 4 == 1) put(flat.gradient(i), std::vector<double>(count, -1), stream);
            if (i % 4 == 2) put(flat.gradient(i), std::vector<std::uint16_t>(count, 0xBC00), stream);
            if (i % 4 == 3) put(flat.gradient(i), std::vector<std::uint16_t>(count, 0xBF80), stream);
        }
        flat.step_async(stream);
        unsigned wrong = 0;
        for (std::size_t i = 0; i < specs.size(); ++i) {
            const std::uint64_t count = i % 7;
            const unsigned rate = 1U << (i % 3);
            // 1, 2 and 4 as float16 and as bfloat16
            const auto half = static_cast<std::uint16_t>(0x3C00 + 0x400 * (i % 3));
            const auto brain = static_cast<std::uint16_t>(0x3F80 + 0x80 * (i % 3));
            if (i % 4 == 0)
                wrong += values_of<float>(flat.parameter(i), count, stream) !=
                         std::vector<float>(count, static_cast<float>(rate));
            if (i % 4 == 1)
                wrong +=
                    values_of<double>(flat.parameter(i), count, stream) != std::vector<double>(count, rate);
            if (i % 4 > 1)
                wrong += values_of<std::uint16_t>(flat.parameter(i), count, stream) !=
                         std::vector<std::uint16_t>(count, i % 4 == 2 ? half : brain);
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE(
    "flat parameters: 16-bit parameters are computed in float32, and master copies keep what rounding "
    "drops") {
    on_each_device([](const device& device) {
        for (const bool masters : {false, true}) {
            CAPTURE(masters);
            const stream stream(device);
            const std::vector<float> values(100, 1.0F);
            flat_parameters flat({{"w", bfloat16, {100}}}, {sgd{.rate = 1}}, stream,
                                 {.master_copies = masters});
            put(flat.parameter(0), as_bfloat16(values), stream);
            // less than half of 2^-8, the distance from 1 to the next smaller bfloat16
            const std::vector<float> gradients(100, 0x1p-10F);
            put(flat.gradient(0), as_bfloat16(gradients), stream);
            for (unsigned step = 0; step < 16; ++step)
                flat.step_async(stream);
            const float expected = masters ? 1 - 16 * 0x1p-10F : 1;
            const auto after = from_bfloat16(values_of<std::uint16_t>(flat.parameter(0), 100, stream));
            CHECK(after == std::vector<float>(100, expected));
            CHECK(flat.state_names() ==
                  (masters ? std::vector<std::string>{"master"} : std::vector<std::string>{}));
            if (masters)
                CHECK(values_of<float>(flat.state(0, 0), 100, stream) == std::vector<float>(100, expected));
        }
    });
}

TEST_CASE("flat parameters: what others write to a 16-bit parameter replaces its master copy") {
    on_each_device([](const device& device) {
        const stream stream(device);
        flat_parameters flat({{"w", bfloat16, {64}}}, {sgd{.rate = 1}}, stream, {.master_copies = true});
        put(flat.gradient(0), as_bfloat16(std::vector<float>(64, 0x1p-10F)), stream);
        put(flat.parameter(0), as_bfloat16(std::vector<float>(64, 1)), stream);
        flat.step_async(stream);
        put(flat.parameter(0), as_bfloat16(std::vector<float>(32, 5)), stream);  // the first half
        flat.step_async(stream);
        const auto masters = values_of<float>(flat.state(0, 0), 64, stream);
        CHECK(masters.front() == 5 - 0x1p-10F);
        CHECK(masters.back() == 1 - 2 * 0x1p-10F);
    });
}

TEST_CASE("flat parameters: a new rate has effect from the next step on, in its group") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const std::vector<parameter_spec> specs{{"a", dtype::of<float>(), {3}, 0},
                                                {"b", dtype::of<double>(), {3}, 1}};
        flat_parameters flat(specs, {sgd{.rate = 1}, sgd{.rate = 1}}, stream);
        put(flat.gradient(0), std::vector<float>(3, 1), stream);
        put(flat.gradient(1), std::vector<double>(3, 1), stream);
        flat.step_async(stream);
        flat.set_rate_async(1, 0.25, stream);
        flat.step_async(stream);
        CHECK(values_of<float>(flat.parameter(0), 3, stream) == std::vector<float>(3, -2));
        CHECK(values_of<double>(flat.parameter(1), 3, stream) == std::vector<double>(3, -1.25));
        CHECK(rate_of(flat.group(0)) == 1);
        CHECK(rate_of(flat.group(1)) == 0.25);
        CHECK_THROWS_AS(flat.set_rate_async(2, 1, stream), invalid_argument);
        CHECK_THROWS_AS(flat.set_rate_async(0, -1, stream), invalid_argument);
    });
}

TEST_CASE("flat parameters: check_views names the first tensor that has left the buffer") {
    const stream stream(device::host());
    const flat_parameters flat(
        {{"w", dtype::of<float>(), {2}}, {"none", dtype::of<float>(), {0}}, {"b", dtype::of<float>(), {2}}},
        {sgd{}}, stream);
    std::vector<const void*> parameters;
    std::vector<const void*> gradients;
    for (std::size_t i = 0; i < 3; ++i) {
        parameters.push_back(flat.parameter(i));
        gradients.push_back(flat.gradient(i));
    }
    flat.check_views(parameters, gradients);
    parameters[1] = nullptr;  // a framework's address of an empty tensor
    flat.check_views(parameters, gradients);
    flat.check_views({}, {});
    const auto message_of = [&] {
        try {
            flat.check_views(parameters, gradients);
        } catch (const invalid_argument& failure) {
            return std::string(failure.what());
        }
        return std::string();
    };
    gradients[2] = &stream;
    CHECK(message_of().find("gradient of parameter 'b'") != std::string::npos);
    parameters[0] = nullptr;
    CHECK(message_of().find("parameter 'w'") != std::string::npos);
    parameters.pop_back();
    CHECK_THROWS_AS(flat.check_views(parameters, {}), invalid_argument);
}

TEST_CASE("flat parameters: wrong parameters and settings are refused") {
    const stream stream(device::host());
    const auto make = [&](std::vector<parameter_spec> specs, std::vector<optimizer> groups) {
        return flat_parameters(std::move(specs), std::move(groups), stream);
    };
    const dtype type = dtype::of<float>();
    CHECK_THROWS_AS(make({{"w", type, {1}}, {"w", type, {1}}}, {sgd{}}), invalid_argument);
    CHECK_THROWS_AS(make({{"", type, {1}}}, {sgd{}}), invalid_argument);
    CHECK_THROWS_WITH_AS(make({{"__metadata__", type, {1}}}, {sgd{}}),
                         "a parameter cannot be called '__metadata__': no tensor in a file can",
                         invalid_argument);
    CHECK_THROWS_WITH_AS(make({{"\xff", type, {1}}}, {sgd{}}), "the name '\\xff' of a parameter is not UTF-8",
                         invalid_argument);
    CHECK_THROWS_WITH_AS(
        make({{"w", type, {1}}, {"w.exp_avg", type, {1}}}, {adam{}}),
        "a parameter cannot be called 'w.exp_avg': the state exp_avg of 'w' is saved under that name",
        invalid_argument);
    CHECK(make({{"w", type, {1}}, {"w.exp_avg", type, {1}}}, {sgd{}}).parameters().size() == 2);
    CHECK_THROWS_AS(flat_parameters({{"w", bfloat16, {1}}, {"w.master", type, {1}}}, {sgd{}}, stream,
                                    {.master_copies = true}),
                    invalid_argument);
    CHECK(flat_parameters({{"w", type, {1}}, {"w.master", bfloat16, {1}}}, {sgd{}}, stream,
                          {.master_copies = true})
              .parameters()
              .size() == 2);
    CHECK_THROWS_AS(make({{"w", type, {1}, 1}}, {sgd{}}), invalid_argument);
    CHECK_THROWS_AS(flat_parameters({{"w", type, {1}}}, {sgd{}}, stream,
                                    {.nonfinite = static_cast<nonfinite_gradients>(3)}),
                    invalid_argument);
    CHECK_THROWS_AS(make({{"w", type, {1}}}, {}), invalid_argument);
    CHECK_THROWS_AS(make({{"w", dtype::of<int>(), {1}}}, {sgd{}}), unsupported);
    CHECK_THROWS_AS(make({{"w", dtype::parse(">f4"), {1}}}, {sgd{}}), unsupported);
    CHECK_THROWS_AS(make({{"w", type, {std::uint64_t{1} << 40, std::uint64_t{1} << 40}}}, {sgd{}}),
                    invalid_argument);
    // shapes that `save` cannot write
    CHECK_THROWS_WITH_AS(make({{"w", type, shape_vector(65, 1)}}, {sgd{}}),
                         "parameter 'w' has 65 axes; a safetensors file allows at most 64", invalid_argument);
    CHECK_THROWS_AS(make({{"w", type, {std::uint64_t{1} << 62, 0}}}, {sgd{}}), invalid_argument);
    CHECK_THROWS_AS(make({{"w", type, {1}}}, {sgd{}, adam{}}), invalid_argument);
    CHECK_THROWS_AS(make({{"w", type, {1}}}, {sgd{}, sgd{.momentum = 0.9}}), invalid_argument);
    for (const optimizer& wrong : std::vector<optimizer>{
             sgd{.rate = -1}, sgd{.nesterov = true}, sgd{.momentum = -1}, sgd{.rate = std::nan("")},
             adam{.beta1 = 1}, adam{.beta2 = -0.1}, adam{.epsilon = -1}, adam{.weight_decay = -1},
             adam{.beta2 = 1 - 1e-9}, rprop{.shrink = 1}, rprop{.grow = 1},
             rprop{.min_step = 2, .max_step = 1}, adadelta{.rho = 1.1}, rmsprop{.momentum = -1},
             nadam{.momentum_decay = -1}, asgd{.decay_term = -1}, adagrad{.initial_sum = -1},
             sparse_adam{.rate = std::numeric_limits<double>::infinity()}}) {
        CAPTURE(rule_name(wrong));
        CHECK_THROWS_AS(make({{"w", type, {1}}}, {wrong}), invalid_argument);
    }
    flat_parameters flat = one_parameter<float>(2, sgd{}, stream);
    CHECK_THROWS_AS(flat.index_of("v"), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(flat.parameter(1)), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(flat.gradient(1)), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(flat.state(0, 0)), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(flat.group(1)), invalid_argument);
    CHECK_THROWS_AS(flat.clip_norm(-1), invalid_argument);
    CHECK_THROWS_AS(flat.clip_value(std::nan("")), invalid_argument);
    const flat_parameters taken = std::move(flat);
    CHECK_THROWS_AS(flat.step_async(stream), invalid_argument);
}

TEST_CASE("flat parameters: without elements a step counts and nothing else happens") {
    on_each_device([](const device& device) {
        const stream stream(device);
        flat_parameters flat({{"w", dtype::of<float>(), {0}}}, {adam{}}, stream,
                             {.nonfinite = nonfinite_gradients::skip});
        flat.zero_gradients_async(stream);
        flat.clip_norm(1);
        flat.step_async(stream);
        CHECK(flat.read_progress(stream).steps == 1);
        flat_parameters none({}, {adam{}}, stream);
        none.step_async(stream);
        CHECK(none.read_progress(stream).steps == 1);
    });
}

TEST_CASE(
    "flat parameters: memory comes from the caller's resource, and the result of share keeps it alive") {
    on_each_device([](const device& device) {
        const auto resource = std::make_shared<counting_resource>();
        {
            const stream stream(device);
            std::shared_ptr<const void> shared;
            {
                const flat_parameters flat =
                    one_parameter<float>(1000, adam{}, stream, {.resource = resource});
                CHECK(resource->allocated > 0);
                shared = flat.share();
            }
            CHECK(resource->deallocated == 0);
        }
        CHECK(resource->deallocated == resource->allocated);
    });
}

TEST_CASE("flat parameters: tensors of a parameter and of its gradient outlive the object") {
    on_each_device([](const device& device) {
        const stream stream(device);
        std::optional<flat_parameters> flat;
        flat.emplace(std::vector<parameter_spec>{{"w", dtype::of<float>(), {2, 3}}},
                     std::vector<optimizer>{sgd{}}, stream);
        put(flat->gradient(0), std::vector<float>{1, 2, 3, 4, 5, 6}, stream);
        foreign_tensor parameter(to_dlpack(*flat, 0, flat_view::parameter).release());
        const foreign_tensor gradient(
            to_dlpack<dlpack::managed_tensor>(*flat, 0, flat_view::gradient).release());
        CHECK(parameter.writable_data() == flat->parameter(0));
        CHECK_THROWS_AS(static_cast<void>(to_dlpack(*flat, 1, flat_view::parameter)), invalid_argument);
        flat.reset();
        CHECK(gradient.device() == device);
        CHECK(gradient.view().shape() == shape_vector{2, 3});
        CHECK(gradient.view().dtype() == dtype::of<float>());
        CHECK(values_of<float>(gradient.contiguous_data(), 6, stream) ==
              std::vector<float>{1, 2, 3, 4, 5, 6});
    });
}
