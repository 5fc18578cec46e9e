#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
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
