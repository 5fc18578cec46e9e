#include "src/device/cuda/digest.hpp"

#include "src/device/digest_mix.hpp"

// These kernels are memory-bound by design. They read whole words, 16 bytes at a time if the row's address
// allows it, with several loads in flight. The threads of a warp add up their sums by shuffles. Only
// `whole_samples` by block uses shared memory. Atomics are used once per warp or block for the total, and
// once per part for rows of several parts. All indices are 64 bits wide.

namespace pinflow::detail::cuda {

namespace {

constexpr unsigned warp_threads = 32;
constexpr unsigned whole_warp = 0xFFFFFFFFU;

/// The bytes of one array. Loads may touch neighbouring rows, but no memory outside the array.
struct readable {
    const unsigned char* begin;
    const unsigned char* end;
};

/// The word at `address`, which is a multiple of 8; bytes that may not be read count as zero.
__device__ std::uint64_t aligned_word(const readable& limits, const unsigned char* address) {
    if (address >= limits.begin && address + 8 <= limits.end) {
        return *reinterpret_cast<const std::uint64_t*>(address);
    }
    std::uint64_t word = 0;
    for (unsigned i = 0; i < 8; ++i) {
        if (address + i >= limits.begin && address + i < limits.end) {
            word |= static_cast<std::uint64_t>(address[i]) << (8 * i);
        }
    }
    return word;
}

/// The first `size` bytes (1 to 8) at `address`, of any alignment, as a word.
__device__ std::uint64_t any_word(const readable& limits, const unsigned char* address, unsigned size) {
    const auto misaligned = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(address) % 8);
    const unsigned char* const aligned = address - misaligned;
    std::uint64_t word = aligned_word(limits, aligned) >> (8 * misaligned);
    if (misaligned + size > 8) word |= aligned_word(limits, aligned + 8) << (64 - 8 * misaligned);
    if (size < 8) word &= (std::uint64_t{1} << (8 * size)) - 1;
    return word;
}

/// The contribution of bytes [begin, end) of a row to its hash, as far as thread `lane` of `Lanes` reads
/// them. `begin` is a multiple of 16.
template <unsigned Lanes>
__device__ std::uint64_t sum_of_part(const readable& limits, const unsigned char* row, std::uint64_t begin,
                                     std::uint64_t end, unsigned lane) {
    std::uint64_t sum = 0;
    std::uint64_t word = begin / 8;
    const std::uint64_t words = end / 8;
    if (reinterpret_cast<std::uintptr_t>(row) % 16 == 0) {
        const auto* const pairs = reinterpret_cast<const ulonglong2*>(row);
        const std::uint64_t last = words / 2;
#pragma unroll 4
        for (std::uint64_t pair = word / 2 + lane; pair < last; pair += Lanes) {
            const ulonglong2 value = pairs[pair];
            sum += digest_word(value.x, 2 * pair) + digest_word(value.y, 2 * pair + 1);
        }
        if (last * 2 > word) word = last * 2;
    }
#pragma unroll 4
    for (std::uint64_t i = word + lane; i < words; i += Lanes) {
        sum += digest_word(any_word(limits, row + 8 * i, 8), i);
    }
    const auto tail = static_cast<unsigned>(end % 8);
    if (tail != 0 && lane == 0) sum += digest_word(any_word(limits, row + 8 * words, tail), words);
    return sum;
}

__device__ std::uint64_t warp_sum(std::uint64_t value) {
    for (unsigned distance = warp_threads / 2; distance != 0; distance /= 2) {
        value += __shfl_down_sync(whole_warp, value, distance);
    }
    return value;
}

__device__ readable limits_of(const digest_rows& array) {
    return {array.rows, array.rows + array.row_count * array.row_size_bytes};
}

__global__ void __launch_bounds__(digest_threads)
    rows_by_thread(digest_rows array, unsigned long long* hashes) {
    const readable limits = limits_of(array);
    const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
    for (std::uint64_t row = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < array.row_count;
         row += threads) {
        const std::uint64_t sum =
            sum_of_part<1>(limits, array.rows + row * array.row_size_bytes, 0, array.row_size_bytes, 0);
        hashes[row] = array.row_size_bytes + sum;
    }
}

__global__ void __launch_bounds__(digest_threads)
    rows_by_warp(digest_rows array, unsigned long long* hashes) {
    const readable limits = limits_of(array);
    const unsigned lane = threadIdx.x % warp_threads;
    const std::uint64_t warps = std::uint64_t{gridDim.x} * (blockDim.x / warp_threads);
    const std::uint64_t units = array.row_count * array.parts;
    // all threads of a warp have the same unit, so that all take part in the warp's sum
    for (std::uint64_t unit =
             std::uint64_t{blockIdx.x} * (blockDim.x / warp_threads) + threadIdx.x / warp_threads;
         unit < units; unit += warps) {
        const std::uint64_t row = array.parts == 1 ? unit : unit / array.parts;
        const std::uint64_t part = unit - row * array.parts;
        const std::uint64_t begin = part * array.part_bytes;
        const std::uint64_t end = part + 1 == array.parts ? array.row_size_bytes : begin + array.part_bytes;
        std::uint64_t sum = warp_sum(
            sum_of_part<warp_threads>(limits, array.rows + row * array.row_size_bytes, begin, end, lane));
        if (lane != 0) continue;
        if (part == 0) sum += array.row_size_bytes;
        if (array.parts == 1) {
            hashes[row] = sum;
        } else {
            atomicAdd(&hashes[row], static_cast<unsigned long long>(sum));
        }
    }
}

/// The sum over the `Lanes` threads that read one row. Only thread 0 of them has the result.
template <unsigned Lanes>
__device__ std::uint64_t sum_of_lanes(std::uint64_t value, std::uint64_t* warp_sums) {
    value = warp_sum(value);
    if (Lanes == warp_threads) return value;
    const unsigned warp = threadIdx.x / warp_threads;
    __syncthreads();  // the sums of the previous row have been read
    if (threadIdx.x % warp_threads == 0) warp_sums[warp] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        value = 0;
        for (unsigned i = 0; i < Lanes / warp_threads; ++i)
            value += warp_sums[i];
    }
    return value;
}

/// Adds whole samples. Each is read by `Lanes` threads: a warp or a block.
template <unsigned Lanes>
__global__ void __launch_bounds__(digest_threads)
    whole_samples(digest_sample work, std::uint64_t row_count, unsigned long long* sum) {
    __shared__ std::uint64_t warp_sums[digest_threads / warp_threads];
    const unsigned lane = threadIdx.x % Lanes;
    const std::uint64_t groups = std::uint64_t{gridDim.x} * (digest_threads / Lanes);
    std::uint64_t total = 0;
    for (std::uint64_t row = std::uint64_t{blockIdx.x} * (digest_threads / Lanes) + threadIdx.x / Lanes;
         row < row_count; row += groups) {
        std::uint64_t sample = 0;
        for (unsigned i = 0; i < work.array_count; ++i) {
            const std::uint64_t size_bytes = work.arrays[i].row_size_bytes;
            const unsigned char* const rows = work.arrays[i].rows;
            const readable limits{rows, rows + row_count * size_bytes};
            const std::uint64_t part =
                sum_of_part<Lanes>(limits, rows + row * size_bytes, 0, size_bytes, lane);
            sample += digest_part(size_bytes + sum_of_lanes<Lanes>(part, warp_sums), i);
        }
        if (lane == 0) total += digest_mix(sample);
    }
    if (lane == 0 && total != 0) atomicAdd(sum, static_cast<unsigned long long>(total));
}

__global__ void __launch_bounds__(digest_threads)
    samples(const unsigned long long* hashes, std::uint64_t arrays, std::uint64_t row_count,
            unsigned long long* sum) {
    const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
    std::uint64_t total = 0;
    for (std::uint64_t row = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < row_count;
         row += threads) {
        std::uint64_t sample = 0;
        for (std::uint64_t array = 0; array < arrays; ++array) {
            sample += digest_part(hashes[array * row_count + row], array);
        }
        total += digest_mix(sample);
    }
    total = warp_sum(total);
    if (threadIdx.x % warp_threads == 0) atomicAdd(sum, static_cast<unsigned long long>(total));
}

}  // namespace

const void* digest_rows_by_thread() {
    return reinterpret_cast<const void*>(&rows_by_thread);
}

const void* digest_rows_by_warp() {
    return reinterpret_cast<const void*>(&rows_by_warp);
}

const void* digest_whole_samples(bool by_block) {
    return by_block ? reinterpret_cast<const void*>(&whole_samples<digest_threads>)
                    : reinterpret_cast<const void*>(&whole_samples<warp_threads>);
}

const void* digest_samples() {
    return reinterpret_cast<const void*>(&samples);
}

}  // namespace pinflow::detail::cuda
