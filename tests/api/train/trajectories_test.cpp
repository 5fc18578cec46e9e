#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "devices.hpp"
#include "flat_models.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "temporary_folder.hpp"

// Every rule of torch.optim that pinflow has, against PyTorch. tests/train/trajectories.py has made the
// files, with the same settings.

using namespace pinflow;

namespace {

constexpr std::uint64_t elements = 64;
constexpr unsigned recorded[] = {1, 10, 100, 200};

struct setting {
    std::string name;
    optimizer settings;
};

std::vector<setting> all_settings() {
    return {
        {"sgd", sgd{.rate = 1e-2}},
        {"sgd decay maximize", sgd{.rate = 1e-2, .weight_decay = 0.1, .maximize = true}},
        {"sgd momentum", sgd{.rate = 1e-2, .momentum = 0.9}},
        {"sgd dampening decay", sgd{.rate = 1e-2, .momentum = 0.8, .dampening = 0.3, .weight_decay = 0.05}},
        {"sgd nesterov", sgd{.rate = 1e-2, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}},
        {"adagrad", adagrad{}},
        {"adagrad decay",
         adagrad{.rate_decay = 0.02, .weight_decay = 0.1, .initial_sum = 0.5, .maximize = true}},
        {"adadelta", adadelta{}},
        {"adadelta decay", adadelta{.rate = 0.5, .rho = 0.95, .epsilon = 1e-5, .weight_decay = 0.1}},
        {"rmsprop", rmsprop{}},
        {"rmsprop centered", rmsprop{.weight_decay = 0.01, .centered = true}},
        {"rmsprop momentum", rmsprop{.rate = 1e-3, .alpha = 0.9, .momentum = 0.9}},
        {"rmsprop centered momentum",
         rmsprop{.rate = 1e-3, .momentum = 0.9, .centered = true, .maximize = true}},
        {"rprop", rprop{}},
        {"rprop steps", rprop{.rate = 0.1, .shrink = 0.4, .grow = 1.5, .min_step = 1e-4, .max_step = 0.5}},
        {"adam", adam{}},
        {"adam decay", adam{.rate = 1e-2, .beta1 = 0.8, .beta2 = 0.99, .weight_decay = 0.1}},
        {"adam low betas", adam{.rate = 1e-2, .beta1 = 0, .beta2 = 0.4}},
        {"adam slow", adam{.beta1 = 0.99, .beta2 = 0.9999}},
        {"adam amsgrad", adam{.amsgrad = true, .maximize = true}},
        {"adamw", adamw{}},
        {"adamw amsgrad", adamw{.rate = 1e-2, .weight_decay = 0.3, .amsgrad = true}},
        {"adamax", adamax{}},
        {"adamax decay", adamax{.rate = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1}},
        {"adamax low betas", adamax{.beta1 = 0.3, .beta2 = 0.9}},
        {"nadam", nadam{}},
        {"nadam decay", nadam{.rate = 1e-2, .weight_decay = 0.1, .momentum_decay = 0.02}},
        {"nadam decoupled", nadam{.weight_decay = 0.1, .decoupled_weight_decay = true, .maximize = true}},
        {"radam", radam{}},
        {"radam decay", radam{.rate = 1e-2, .beta2 = 0.95, .weight_decay = 0.1}},
        {"radam decoupled", radam{.weight_decay = 0.1, .decoupled_weight_decay = true}},
        {"asgd", asgd{}},
        {"asgd averaging",
         asgd{.rate = 0.1, .decay_term = 1e-2, .power = 0.6, .average_from = 50, .weight_decay = 0.01}},
        {"sparse_adam", sparse_adam{}},
        {"sparse_adam betas", sparse_adam{.rate = 1e-2, .beta1 = 0.8, .beta2 = 0.99, .epsilon = 1e-4}},
    };
}

std::filesystem::path folder_of_references() {
    const char* const other = std::getenv("PINFLOW_TRAJECTORIES");
    return other != nullptr ? other : PINFLOW_TRAJECTORIES;
}

template <typename T>
std::vector<T> reference(const std::string& name) {
    const array opened = open_npy(folder_of_references() / name);
    const auto* const begin = reinterpret_cast<const T*>(opened.view().data());
    return {begin, begin + opened.view().size()};
}

/// The file has float32, whatever T is.
template <typename T>
std::vector<T> converted(const std::string& name) {
    const std::vector<float> values = reference<float>(name);
    return {values.begin(), values.end()};
}

template <typename T>
std::vector<T> row_of(const std::vector<T>& rows, std::size_t row) {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(row * elements);
    return {begin, begin + elements};
}

template <typename A, typename B>
double max_difference(const std::vector<A>& a, const std::vector<B>& b) {
    double result = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        result = std::max(result, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    return result;
}

template <typename T>
double max_magnitude(const std::vector<T>& values) {
    return max_difference(values, std::vector<T>(values.size()));
}

/// The parameters after each recorded step, one after the other.
template <typename T>
std::vector<T> trajectory(const device& device, const optimizer& settings, unsigned steps = 200,
                          const std::filesystem::path& saved_at_100 = {}) {
    const stream stream(device);
    flat_parameters flat = one_parameter<T>(elements, settings, stream);
    const auto gradients = converted<T>("gradients.npy");
    put(flat.parameter(0), converted<T>("first.npy"), stream);
    std::vector<T> result;
    for (unsigned step = 1; step <= steps; ++step) {
        put(flat.gradient(0), row_of(gradients, step - 1), stream);
        flat.step_async(stream);
        if (step == 100 && !saved_at_100.empty()) flat.save(saved_at_100, stream);
        if (std::ranges::find(recorded, step) == std::end(recorded)) continue;
        const auto values = values_of<T>(flat.parameter(0), elements, stream);
        result.insert(result.end(), values.begin(), values.end());
    }
    CHECK(flat.read_progress(stream).steps == steps);
    return result;
}

}  // namespace

TEST_CASE(
    "optimizers: the rules of torch.optim that pinflow has follow PyTorch for 200 steps, in float32 and "
    "float64") {
    std::ifstream names(folder_of_references() / "settings.txt");
    const auto of_torch32 = reference<float>("torch32.npy");
    const auto of_torch64 = reference<double>("torch64.npy");
    const std::vector<setting> settings = all_settings();
    for (std::size_t i = 0; i < settings.size(); ++i) {
        std::string name;
        REQUIRE(std::getline(names, name));
        REQUIRE(name == settings[i].name);
        CAPTURE(name);
        std::vector<float> of_host32;
        std::vector<double> of_host64;
        on_each_device([&](const device& device) {
            const auto ours32 = trajectory<float>(device, settings[i].settings);
            const auto ours64 = trajectory<double>(device, settings[i].settings);
            REQUIRE(ours32.size() == std::size(recorded) * elements);
            for (std::size_t k = 0; k < std::size(recorded); ++k) {
                CAPTURE(recorded[k]);
                const std::size_t row = i * std::size(recorded) + k;
                const auto torch64 = row_of(of_torch64, row);
                const double scale = max_magnitude(torch64);
                // these bounds hold for rprop, too: no sign of a step differs from PyTorch's
                CHECK(max_difference(row_of(ours32, k), torch64) <=
                      2 * max_difference(row_of(of_torch32, row), torch64) + 1e-6 * scale);
                CHECK(max_difference(row_of(ours64, k), torch64) <= 1e-12 * scale);
            }
            // the same bits on every device, and in a second run
            if (of_host32.empty()) {
                of_host32 = trajectory<float>(device, settings[i].settings);
                of_host64 = trajectory<double>(device, settings[i].settings);
            }
            CHECK(same_bits(ours32, of_host32));
            CHECK(same_bits(ours64, of_host64));
        });
    }
}

TEST_CASE("optimizers: steps after a resume have the bits that they have without one") {
    const temporary_folder folder;
    for (const setting& each : all_settings()) {
        CAPTURE(each.name);
        const auto resume = [&]<typename Number>(const device& device, Number) {
            const auto path = folder / (each.name + ".safetensors");
            const auto whole = trajectory<Number>(device, each.settings, 200, path);
            const stream stream(device);
            flat_parameters resumed = one_parameter<Number>(elements, each.settings, stream);
            resumed.load(path, stream);
            const auto gradients = converted<Number>("gradients.npy");
            for (unsigned step = 101; step <= 200; ++step) {
                put(resumed.gradient(0), row_of(gradients, step - 1), stream);
                resumed.step_async(stream);
            }
            CHECK(resumed.read_progress(stream).steps == 200);
            CHECK(same_bits(values_of<Number>(resumed.parameter(0), elements, stream), row_of(whole, 3)));
        };
        on_each_device([&](const device& device) {
            resume(device, float{});
            resume(device, double{});
        });
    }
}

TEST_CASE(
    "optimizers: the millionth float32 step, too, is within 4 float32 units in the last place of PyTorch's "
    "float64 step") {
    const std::vector<std::pair<std::string, std::vector<std::string>>> late = {
        {"adagrad decay", {"sum"}},
        {"adam", {"exp_avg", "exp_avg_sq"}},
        {"adam slow", {"exp_avg", "exp_avg_sq"}},
        {"adam amsgrad", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
        {"adamax", {"exp_avg", "exp_inf"}},
        {"nadam", {"exp_avg", "exp_avg_sq"}},
        {"radam", {"exp_avg", "exp_avg_sq"}},
        {"asgd averaging", {"ax"}},
        {"sparse_adam", {"exp_avg", "exp_avg_sq"}},
    };
    constexpr std::uint64_t numbers[] = {1'500, 20'000, 1'000'000};
    const auto references = reference<double>("late64.npy");
    const auto states = reference<float>("late_state.npy");
    const auto first = reference<float>("first.npy");
    const auto gradient = row_of(reference<float>("gradients.npy"), 1);
    const temporary_folder folder;
    const std::vector<setting> settings = all_settings();
    for (std::size_t i = 0; i < late.size(); ++i) {
        CAPTURE(late[i].first);
        const auto found = std::ranges::find(settings, late[i].first, &setting::name);
        REQUIRE(found != settings.end());
        for (std::size_t k = 0; k < std::size(numbers); ++k) {
            CAPTURE(numbers[k]);
            // a file as `save` writes it
            std::vector<safetensors_writer::tensor> tensors{{"w", dtype::of<float>(), {elements}}};
            for (const std::string& state : late[i].second)
                tensors.push_back({"w." + state, dtype::of<float>(), {elements}});
            safetensors_writer writer(folder / "late.safetensors", tensors,
                                      {{"pinflow.rule", std::string(rule_name(found->settings))},
                                       {"pinflow.steps", std::to_string(numbers[k] - 1)}});
            writer.write(std::as_bytes(std::span(first)));
            for (std::size_t state = 0; state < late[i].second.size(); ++state)
                writer.write(std::as_bytes(std::span(states).subspan(state * elements, elements)));
            writer.finish();
            const auto expected = row_of(references, i * std::size(numbers) + k);
            on_each_device([&](const device& device) {
                const stream stream(device);
                flat_parameters flat = one_parameter<float>(elements, found->settings, stream);
                flat.load(folder / "late.safetensors", stream);
                put(flat.gradient(0), gradient, stream);
                flat.step_async(stream);
                CHECK(flat.read_progress(stream).steps == numbers[k]);
                const auto values = values_of<float>(flat.parameter(0), elements, stream);
                for (std::size_t e = 0; e < elements; ++e) {
                    const float nearest = std::abs(static_cast<float>(expected[e]));
                    const double unit = std::nextafter(nearest, 1e30F) - nearest;
                    CHECK(std::abs(static_cast<double>(values[e]) - expected[e]) <= 4 * unit);
                }
            });
        }
    }
}

TEST_CASE("optimizers: the averaged parameters of asgd follow PyTorch") {
    const auto expected = reference<double>("average64.npy");
    const std::vector<setting> settings = all_settings();
    const auto found = std::ranges::find(settings, "asgd averaging", &setting::name);
    REQUIRE(found != settings.end());
    const auto gradients = converted<double>("gradients.npy");
    on_each_device([&](const device& device) {
        const stream stream(device);
        flat_parameters flat = one_parameter<double>(elements, found->settings, stream);
        put(flat.parameter(0), converted<double>("first.npy"), stream);
        for (unsigned step = 0; step < 200; ++step) {
            put(flat.gradient(0), row_of(gradients, step), stream);
            flat.step_async(stream);
        }
        const auto average = values_of<double>(flat.state(0, 0), elements, stream);
        CHECK(max_difference(average, expected) <= 1e-12 * max_magnitude(expected));
    });
}
