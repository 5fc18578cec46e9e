// Conversions on the GPU give, bit for bit, what they give on the host. scalar_test.cpp compares those of the
// host with the definitions.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/cuda.hpp"
#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"
#include "src/core/cast.hpp"
#include "src/device/backend.hpp"
#include "src/device/conversion_work.hpp"
#include "tests/cuda_scalar.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;

namespace {

template <typename T>
dtype type_of(T) {
    if constexpr (std::is_same_v<T, detail::half_bits>) {
        return {dtype_kind::floating, 2};
    } else if constexpr (std::is_same_v<T, detail::bfloat16_bits>) {
        return {dtype_kind::bfloat16, 2};
    } else if constexpr (std::is_same_v<T, detail::float8_e4m3fn_bits>) {
        return {dtype_kind::float8_e4m3fn, 1};
    } else if constexpr (std::is_same_v<T, detail::float8_e5m2_bits>) {
        return {dtype_kind::float8_e5m2, 1};
    } else {
        return dtype::of<T>();
    }
}

std::vector<dtype> scalar_types() {
    std::vector<dtype> types;
    for_each_scalar_type([&](auto number) { types.push_back(type_of(number)); });
    return types;
}

template <typename Number>
void append(std::vector<std::byte>& bytes, Number number) {
    std::array<std::byte, sizeof number> raw;
    std::memcpy(raw.data(), &number, sizeof number);
    bytes.insert(bytes.end(), raw.begin(), raw.end());
}

/// Every pattern of 1 and 2 bytes, every 1021st of 4, random ones of 8. For 4 and 8 bytes also numbers near
/// halfway points and powers of two.
std::vector<std::byte> samples(const dtype& type) {
    std::vector<std::byte> bytes;
    if (type.size_bytes() == 1) {
        for (unsigned code = 0; code < 1 << 8; ++code)
            append(bytes, static_cast<std::uint8_t>(code));
        return bytes;
    }
    if (type.size_bytes() == 2) {
        for (unsigned code = 0; code < 1 << 16; ++code)
            append(bytes, static_cast<std::uint16_t>(code));
        return bytes;
    }
    std::mt19937_64 random(type.size_bytes());
    if (type.size_bytes() == 4) {
        for (std::uint64_t code = 0; code < std::uint64_t{1} << 32; code += 1021)
            append(bytes, static_cast<std::uint32_t>(code));
    } else {
        for (int i = 0; i < 1'000'000; ++i)
            append(bytes, random() >> (i % 2 == 0 ? 0 : i % 64));
    }
    for (int exponent = -160; exponent < 160; ++exponent) {
        for (int i = 0; i < 1000; ++i) {
            // a number of few bits often lies halfway between two numbers of a smaller type; its neighbours
            // are tried, too
            const double number =
                std::ldexp(static_cast<double>(random() >> (64 - 1 - i % 24)), exponent - 20);
            for (const double sign : {1.0, -1.0}) {
                for (const double beside :
                     {number, std::nextafter(number, 1e300), std::nextafter(number, 0.0)}) {
                    if (type.kind() != dtype_kind::floating) continue;
                    if (type.size_bytes() == 4) {
                        append(bytes, static_cast<float>(sign * beside));
                    } else {
                        append(bytes, sign * beside);
                    }
                }
            }
        }
    }
    for (int bit = 0; bit < 64; ++bit) {
        for (const std::uint64_t beside : {~std::uint64_t{0}, std::uint64_t{0}, std::uint64_t{1}}) {
            const std::uint64_t limit = (std::uint64_t{1} << bit) + beside;
            if (type.size_bytes() == 4) {
                append(bytes, static_cast<std::uint32_t>(limit));
                append(bytes, static_cast<std::uint32_t>(0 - limit));
            } else {
                append(bytes, limit);
                append(bytes, 0 - limit);
            }
        }
    }
    return bytes;
}

std::uint64_t count_different(const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                              std::uint64_t item_size_bytes) {
    std::uint64_t different = 0;
    for (std::size_t i = 0; i < a.size(); i += item_size_bytes) {
        different += std::memcmp(a.data() + i, b.data() + i, item_size_bytes) != 0;
    }
    return different;
}

}  // namespace

TEST_CASE("cuda scalar: every type of number becomes every other, bit for bit as on the host") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const std::vector<dtype> types = scalar_types();
    for (std::size_t from = 0; from < types.size(); ++from) {
        const std::vector<std::byte> source = samples(types[from]);
        const std::uint64_t count = source.size() / types[from].size_bytes();
        const device_buffer source_on_gpu(source.size(), stream);
        copy_to_device_async(source_on_gpu.data(), source, stream);
        for (std::size_t to = 0; to < types.size(); ++to) {
            if (from == to) continue;
            CAPTURE(types[from].descr());
            CAPTURE(types[to].descr());
            std::vector<std::byte> expected(count * types[to].size_bytes());
            detail::cast_elements(types[from], source.data(), types[to], expected.data(), count);
            const device_buffer result(expected.size(), stream);
            launch_casts(static_cast<int>(from), source_on_gpu.data(), static_cast<int>(to), result.data(),
                         count, to_cuda(stream));
            REQUIRE(::cudaGetLastError() == cudaSuccess);
            CHECK(count_different(to_host(result.data(), expected.size(), stream), expected,
                                  types[to].size_bytes()) == 0);
        }
    }
}

TEST_CASE("cuda scalar: floats that are cast on their way to the device have the bits of the host") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const std::vector<dtype> types = scalar_types();
    for (const dtype& from : types) {
        const auto source_type = detail::float_type_of(from);
        if (!source_type) continue;
        const std::vector<std::byte> source = samples(from);
        const pinned_buffer pinned(source.size(), gpu);
        std::ranges::copy(source, pinned.data());
        const std::uint64_t count = source.size() / from.size_bytes() - 3;  // the last read is not whole
        for (const dtype& to : types) {
            const auto target_type = detail::float_type_of(to);
            if (!target_type) continue;
            CAPTURE(from.descr());
            CAPTURE(to.descr());
            std::vector<std::byte> expected((count + 2) * to.size_bytes());
            detail::cast_elements(from, source.data(), to, expected.data() + to.size_bytes(), count);
            const device_buffer result(expected.size(), stream);
            gpu.backend().fill_zero(result.data(), expected.size(), stream.view().native_handle());
            gpu.backend().convert_to_device({.source = pinned.data(),
                                             .from = *source_type,
                                             .to = *target_type,
                                             .count = count,
                                             .destination = result.data() + to.size_bytes()},
                                            stream.view().native_handle());
            CHECK(count_different(to_host(result.data(), expected.size(), stream), expected,
                                  to.size_bytes()) == 0);
        }
    }
}

TEST_CASE("cuda scalar: complex numbers are cast part by part") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    std::vector<std::byte> source = samples(dtype::of<double>());
    source.resize(source.size() / 16 * 16);
    const std::uint64_t count = source.size() / 16;
    const device_buffer source_on_gpu(source.size(), stream);
    copy_to_device_async(source_on_gpu.data(), source, stream);
    std::vector<std::byte> expected(count * 8);
    detail::cast_elements(dtype(dtype_kind::complex, 16), source.data(), dtype(dtype_kind::complex, 8),
                          expected.data(), count);
    const device_buffer result(expected.size(), stream);
    launch_complex_casts(source_on_gpu.data(), result.data(), count, to_cuda(stream));
    REQUIRE(::cudaGetLastError() == cudaSuccess);
    CHECK(count_different(to_host(result.data(), expected.size(), stream), expected, 8) == 0);
}

TEST_CASE("cuda scalar: bytes of words are swapped") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const std::vector<std::byte> bytes = samples(dtype::of<std::uint16_t>());
    for (const std::size_t word_size : {std::size_t{2}, std::size_t{4}, std::size_t{8}, std::size_t{16}}) {
        std::vector<std::byte> expected;
        for (std::size_t i = 0; i < bytes.size(); i += word_size) {
            for (std::size_t j = word_size; j-- > 0;)
                expected.push_back(bytes[i + j]);
        }
        const device_buffer words(bytes.size(), stream);
        copy_to_device_async(words.data(), bytes, stream);
        launch_swaps(words.data(), word_size, bytes.size(), to_cuda(stream));
        REQUIRE(::cudaGetLastError() == cudaSuccess);
        CHECK(to_host(words.data(), bytes.size(), stream) == expected);
    }
}
