#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "src/core/scalar.hpp"

/// The conversions of scalar.hpp on the GPU, for the tests.

/// Calls `visit` with an object of every type of a real number, in the order of the type numbers below.
template <typename Visit>
void for_each_scalar_type(Visit visit) {
    using namespace pinflow::detail;
    visit(bool{});
    visit(std::int8_t{});
    visit(std::int16_t{});
    visit(std::int32_t{});
    visit(std::int64_t{});
    visit(std::uint8_t{});
    visit(std::uint16_t{});
    visit(std::uint32_t{});
    visit(std::uint64_t{});
    visit(half_bits{});
    visit(float{});
    visit(double{});
    visit(bfloat16_bits{});
    visit(float8_e4m3fn_bits{});
    visit(float8_e5m2_bits{});
}

/// Casts `count` aligned elements of type number `from` to type number `to`, all in device memory.
void launch_casts(int from, const std::byte* source, int to, std::byte* destination, std::size_t count,
                  cudaStream_t stream);
/// Reverses the bytes of each word in `size_bytes` bytes. Words have 2, 4, 8 or 16 bytes.
void launch_swaps(std::byte* words, std::size_t word_size_bytes, std::size_t size_bytes, cudaStream_t stream);
/// Casts `count` complex numbers of doubles to complex numbers of floats.
void launch_complex_casts(const std::byte* source, std::byte* destination, std::size_t count,
                          cudaStream_t stream);
