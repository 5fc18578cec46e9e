#include "tests/cuda_scalar.hpp"

namespace {

using namespace pinflow::detail;

constexpr int blocks = 256;
constexpr int threads = 256;

__device__ std::size_t first_index() {
    return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

__device__ std::size_t index_step() {
    return std::size_t{gridDim.x} * blockDim.x;
}

template <typename T>
__device__ T number(const T* source) {
    return *source;
}

// any byte but 0 is true
__device__ bool number(const bool* source) {
    return *reinterpret_cast<const unsigned char*>(source) != 0;
}

template <typename From, typename To>
__global__ void cast_all(const From* source, To* destination, std::size_t count) {
    for (std::size_t i = first_index(); i < count; i += index_step()) {
        destination[i] = cast_scalar<To>(number(source + i));
    }
}

template <typename Word>
__global__ void swap_all(Word* words, std::size_t count) {
    for (std::size_t i = first_index(); i < count; i += index_step()) {
        words[i] = byte_swap(words[i]);
    }
}

template <typename Word>
void launch_swaps_of(std::byte* words, std::size_t size_bytes, cudaStream_t stream) {
    swap_all<<<blocks, threads, 0, stream>>>(reinterpret_cast<Word*>(words), size_bytes / sizeof(Word));
}

}  // namespace

void launch_casts(int from, const std::byte* source, int to, std::byte* destination, std::size_t count,
                  cudaStream_t stream) {
    int from_index = 0;
    for_each_scalar_type([&](auto from_number) {
        if (from_index++ != from) return;
        int to_index = 0;
        for_each_scalar_type([&](auto to_number) {
            if (to_index++ != to) return;
            using from_type = decltype(from_number);
            using to_type = decltype(to_number);
            cast_all<<<blocks, threads, 0, stream>>>(reinterpret_cast<const from_type*>(source),
                                                     reinterpret_cast<to_type*>(destination), count);
        });
    });
}

void launch_swaps(std::byte* words, std::size_t word_size_bytes, std::size_t size_bytes,
                  cudaStream_t stream) {
    if (word_size_bytes == 2) launch_swaps_of<std::uint16_t>(words, size_bytes, stream);
    if (word_size_bytes == 4) launch_swaps_of<std::uint32_t>(words, size_bytes, stream);
    if (word_size_bytes == 8) launch_swaps_of<std::uint64_t>(words, size_bytes, stream);
    if (word_size_bytes == 16) launch_swaps_of<word_pair>(words, size_bytes, stream);
}

void launch_complex_casts(const std::byte* source, std::byte* destination, std::size_t count,
                          cudaStream_t stream) {
    cast_all<<<blocks, threads, 0, stream>>>(reinterpret_cast<const complex_parts<double>*>(source),
                                             reinterpret_cast<complex_parts<float>*>(destination), count);
}
