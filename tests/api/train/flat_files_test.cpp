#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "devices.hpp"
#include "flat_models.hpp"
#include "pinflow/error.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

TEST_CASE("flat parameters: load cancels clip_norm and clip_value of the next step") {
    const temporary_folder folder;
    on_each_device([&](const device& device) {
        const stream stream(device);
        flat_parameters flat = one_parameter<float>(4, sgd{.rate = 1}, stream);
        flat.save(folder / "zero.safetensors", stream);
        flat.clip_norm(0);
        flat.clip_value(0);
        flat.load(folder / "zero.safetensors", stream);
        put(flat.gradient(0), std::vector<float>(4, -1), stream);
        flat.step_async(stream);
        CHECK(values_of<float>(flat.parameter(0), 4, stream) == std::vector<float>(4, 1));
    });
}

TEST_CASE("flat parameters: a file of other parameters or another rule is refused, and changes nothing") {
    on_each_device([](const device& device) {
        const temporary_folder folder;
        const stream stream(device);
        const auto saved = [&](std::vector<parameter_spec> specs, const optimizer& settings) {
            const auto path = folder / "saved.safetensors";
            flat_parameters(std::move(specs), {settings}, stream).save(path, stream);
            return path;
        };
        const dtype type = dtype::of<float>();
        flat_parameters flat({{"w", type, {4}}, {"b", type, {2}}}, {adam{}}, stream);
        const auto values = random_values(4, 5);
        put(flat.parameter(0), values, stream);
        const auto refuses = [&](const std::filesystem::path& path) {
            CHECK_THROWS_AS(flat.load(path, stream), state_mismatch);
            CHECK(same_bits(values_of<float>(flat.parameter(0), 4, stream), values));
        };
        refuses(saved({{"w", type, {4}}, {"b", type, {2}}}, adamw{}));
        refuses(saved({{"w", type, {4}}, {"b", type, {2}}}, adam{.amsgrad = true}));
        refuses(saved({{"w", type, {4}}}, adam{}));
        refuses(saved({{"w", type, {4}}, {"c", type, {2}}}, adam{}));
        refuses(saved({{"w", type, {2, 2}}, {"b", type, {2}}}, adam{}));
        refuses(saved({{"w", dtype::of<double>(), {4}}, {"b", type, {2}}}, adam{}));
        const auto of_table = folder / "table.safetensors";
        embedding_table({.row_count = 2, .columns = 4}, device).save(of_table);  // by Adam, too
        refuses(of_table);
        const auto path = saved({{"w", type, {4}}, {"b", type, {2}}}, adam{});
        {
            std::fstream file(path);
            const std::string bytes(std::istreambuf_iterator<char>(file), {});
            const std::size_t place = bytes.find("adam/1");
            REQUIRE(place != std::string::npos);
            file.clear();
            file.seekp(static_cast<std::streamoff>(place));
            file << "adam/2";
        }
        refuses(path);
        CHECK_THROWS_AS(flat.load(folder / "missing", stream), system_failure);
        // another order is the same state
        flat.load(saved({{"b", type, {2}}, {"w", type, {4}}}, adam{}), stream);
        CHECK(values_of<float>(flat.parameter(0), 4, stream) == std::vector<float>(4));
        CHECK_THROWS_AS(saved({{"w", type, {4}}, {"w.exp_avg", type, {4}}}, adam{}), invalid_argument);
    });
}

TEST_CASE(
    "flat parameters: bfloat16 values with states and master copies, and float64 states, come back from a "
    "file of every type") {
    on_each_device([](const device& device) {
        const temporary_folder folder;
        const stream stream(device);
        const std::vector<parameter_spec> specs{{"f", dtype::of<float>(), {5}},
                                                {"d", dtype::of<double>(), {}},
                                                {"h", dtype::parse("<f2"), {2, 0}},
                                                {"b", dtype::parse("bfloat16"), {130}}};
        flat_parameters flat(specs, {adam{}}, stream, {.master_copies = true});
        put(flat.gradient(3), as_bfloat16(std::vector<float>(130, 0.5F)), stream);
        put(flat.gradient(1), std::vector<double>{2}, stream);
        flat.step_async(stream);
        flat.save(folder / "all.safetensors", stream);
        flat_parameters loaded(specs, {adam{}}, stream, {.master_copies = true});
        loaded.load(folder / "all.safetensors", stream);
        CHECK(same_bits(values_of<std::uint16_t>(loaded.parameter(3), 130, stream),
                        values_of<std::uint16_t>(flat.parameter(3), 130, stream)));
        for (std::size_t state = 0; state < 3; ++state)
            CHECK(same_bits(values_of<float>(loaded.state(3, state), 130, stream),
                            values_of<float>(flat.state(3, state), 130, stream)));
        CHECK(values_of<double>(loaded.state(1, 0), 1, stream) ==
              values_of<double>(flat.state(1, 0), 1, stream));
        CHECK(loaded.state(0, 2) == nullptr);
    });
}
