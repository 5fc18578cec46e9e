#include "src/device/cuda/casts.hpp"

#include "src/core/scalar.hpp"

// Threads read the source from host memory in loads of 16 bytes, which keeps enough reads in flight for the
// link. Device memory is many times faster than the link, so elements are written one by one.

namespace pinflow::detail::cuda {

namespace {

template <typename From, typename To>
__global__ void cast_all(device_cast work) {
    constexpr unsigned pack = cast_pack_bytes / sizeof(From);
    const auto* const source = reinterpret_cast<const From*>(work.source);
    auto* const destination = reinterpret_cast<To*>(work.destination);
    const std::uint64_t thread = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
    const std::uint64_t packs = work.count / pack;
    for (std::uint64_t i = thread; i < packs; i += threads) {
        const uint4 words = reinterpret_cast<const uint4*>(source)[i];
        From numbers[pack];
        memcpy(numbers, &words, sizeof words);
        for (unsigned j = 0; j < pack; ++j)
            destination[i * pack + j] = cast_scalar<To>(numbers[j]);
    }
    for (std::uint64_t i = packs * pack + thread; i < work.count; i += threads)
        destination[i] = cast_scalar<To>(source[i]);
}

template <typename From>
const void* kernel_from(cast_type to) {
    switch (to) {
        case cast_type::float16:
            return reinterpret_cast<const void*>(&cast_all<From, half_bits>);
        case cast_type::bfloat16:
            return reinterpret_cast<const void*>(&cast_all<From, bfloat16_bits>);
        case cast_type::float32:
            return reinterpret_cast<const void*>(&cast_all<From, float>);
        case cast_type::float64:
            return reinterpret_cast<const void*>(&cast_all<From, double>);
        case cast_type::float8_e4m3fn:
            return reinterpret_cast<const void*>(&cast_all<From, float8_e4m3fn_bits>);
        case cast_type::float8_e5m2:
            return reinterpret_cast<const void*>(&cast_all<From, float8_e5m2_bits>);
    }
    return nullptr;
}

}  // namespace

const void* cast_kernel(cast_type from, cast_type to) {
    switch (from) {
        case cast_type::float16:
            return kernel_from<half_bits>(to);
        case cast_type::bfloat16:
            return kernel_from<bfloat16_bits>(to);
        case cast_type::float32:
            return kernel_from<float>(to);
        case cast_type::float64:
            return kernel_from<double>(to);
        case cast_type::float8_e4m3fn:
            return kernel_from<float8_e4m3fn_bits>(to);
        case cast_type::float8_e5m2:
            return kernel_from<float8_e5m2_bits>(to);
    }
    return nullptr;
}

}  // namespace pinflow::detail::cuda
