#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"
#include "pinflow/train/flat_parameters.hpp"

/// Copies elements to a view of flat parameters, and waits.
template <typename T>
void put(std::byte* view, const std::vector<T>& values, const pinflow::stream& stream) {
    pinflow::copy_to_device_async(view, std::as_bytes(std::span(values)), stream);
    stream.synchronize();
}

/// Waits for the stream, and copies `count` elements of a view to the host.
template <typename T>
std::vector<T> values_of(const std::byte* view, std::uint64_t count, const pinflow::stream& stream) {
    std::vector<T> values(count);
    pinflow::copy_to_host_async(std::as_writable_bytes(std::span(values)), view, stream);
    stream.synchronize();
    return values;
}

/// Whether all bits are equal, those of NaNs included.
template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// One parameter "w" of `count` elements of T.
template <typename T>
pinflow::flat_parameters one_parameter(std::uint64_t count, const pinflow::optimizer& settings,
                                       const pinflow::stream& stream, pinflow::flat_options options = {}) {
    return {{{"w", pinflow::dtype::of<T>(), {count}}}, {settings}, stream, std::move(options)};
}

/// Normally distributed values.
inline std::vector<float> random_values(std::uint64_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values)
        value = normal(random);
    return values;
}

/// Converts floats that bfloat16 holds exactly.
inline std::vector<std::uint16_t> as_bfloat16(const std::vector<float>& values) {
    std::vector<std::uint16_t> halves;
    for (const float value : values) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        halves.push_back(static_cast<std::uint16_t>(bits >> 16));
    }
    return halves;
}
