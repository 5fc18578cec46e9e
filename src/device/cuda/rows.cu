#include "src/device/cuda/row_errors.cuh"
#include "src/device/cuda/row_pace.cuh"
#include "src/device/cuda/row_words.cuh"
#include "src/device/cuda/rows.hpp"

// The link limits these kernels; for small rows of large tables, address translation does. Few blocks are
// as fast as many, or faster, if rows are taken in the order of their addresses and enough loads are in
// flight (measured: samples/bench/RESULTS.md). Here each group of threads loads up to 512 bytes of each of
// four rows, or pieces of rows, at once. Accesses to device memory cost nothing beside the link. Rows of the
// table are read in aligned words of 16 bytes, and written in such words if the row covers them. All indices
// are 64 bits wide.

namespace pinflow::detail::cuda {

namespace {

__global__ void __launch_bounds__(row_threads)
    check(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count, error_memory errors) {
    for (std::uint64_t i = thread_number(); i < count; i += thread_count()) {
        if (ids[i] >= row_count) add(*errors.counting, i);
    }
    error_count outside;
    if (take_counts(*errors.counting, outside)) write_outside(outside, ids, errors);
}

__global__ void __launch_bounds__(row_threads)
    refuse_repeated(row_order order, const std::uint64_t* ids, error_memory errors) {
    for (std::uint64_t i = thread_number(); i < order.count; i += thread_count()) {
        if (is_repeated(order, i)) add(*errors.counting, position_of(order, i));
    }
    error_count repeated;
    if (!take_counts(*errors.counting, repeated) || repeated.count == 0) return;
    index_errors found = *errors.found;
    found.repeated_count = repeated.count;
    found.repeated_position = ~repeated.complement;
    found.repeated_id = ids[found.repeated_position];
    *errors.report = found;
    *errors.found = found;
}

/// Moves `rows_at_once` rows, or pieces of rows, with a group of `lanes` threads. `begin_row(k)` returns the
/// number of words of the k-th row, or 0 to skip it. At each step, a thread loads at most one word of every
/// row, with load(k, word). Then it stores these words, with store(k, word, value).
///
/// The link moves whole lines of 128 bytes. If a row takes several steps, its steps begin at lines, the first
/// one words_before(k) words before the row. Otherwise two steps would share a line, which would cross the
/// link twice.
template <typename Mover, typename BeginRow>
__device__ void move_some(const Mover& mover, BeginRow begin_row, unsigned lanes, unsigned lane) {
    constexpr unsigned bits_of_row = 4;
    std::uint64_t ends[rows_at_once];  // of the rows, in words from the beginning of the first step
    unsigned begins = 0;               // of the rows, in the same unit: a few bits of each
    std::uint64_t max_end = 0;
#pragma unroll
    for (unsigned k = 0; k < rows_at_once; ++k) {
        ends[k] = begin_row(k);
        if (lanes >= line_words && ends[k] > lanes) {
            const unsigned before = mover.words_before(k);
            begins |= before << (k * bits_of_row);
            ends[k] += before;
        }
        max_end = ends[k] > max_end ? ends[k] : max_end;
    }
    for (std::uint64_t at = lane; at < max_end; at += lanes) {
        const auto begin = [&](unsigned k) { return begins >> (k * bits_of_row) & (line_words - 1); };
        word values[rows_at_once];
#pragma unroll
        for (unsigned k = 0; k < rows_at_once; ++k) {
            if (at >= begin(k) && at < ends[k]) values[k] = mover.load(k, at - begin(k));
        }
#pragma unroll
        for (unsigned k = 0; k < rows_at_once; ++k) {
            if (at >= begin(k) && at < ends[k]) mover.store(k, at - begin(k), values[k]);
        }
    }
}

/// Bytes of each row: all, or a piece.
struct bytes_of_row {
    std::uint64_t offset;
    std::uint64_t size;
};

/// Moves the rows of a launch in its order. The mover's `begin_row(k, index, bytes)` returns 0 for rows to
/// skip.
template <typename Mover>
__device__ void move_rows(const row_launch& launch, Mover mover) {
    const row_transfer& work = launch.transfer;
    if (refused(work.errors)) return;
    const std::uint64_t begin = work.range == nullptr ? work.begin : work.range->begin;
    const std::uint64_t end = work.range == nullptr ? work.end : work.range->end;
    const unsigned lane = threadIdx.x % launch.lanes;
    const std::uint64_t group = thread_number() / launch.lanes;
    const std::uint64_t groups = thread_count() / launch.lanes;
    const std::uint64_t min_lead = min_lead_bytes(launch.pace, end - begin);
    for (std::uint64_t first = begin + group * rows_at_once; first < end; first += groups * rows_at_once) {
        if (min_lead != 0) keep_pace(launch, Mover::own_direction, lane, row_of_table(work, first), min_lead);
        const auto begin_row = [&](unsigned k) {
            return first + k < end ? mover.begin_row(k, first + k, {0, work.table.row_size_bytes}) : 0;
        };
        move_some(mover, begin_row, launch.lanes, lane);
    }
    if (min_lead != 0 && blockIdx.x == 0) end_pace(Mover::own_direction);
}

/// The same, piece by piece: with few rows, a group of threads for each row would leave the link idle.
template <typename Mover>
__device__ void move_pieces(const row_launch& launch, Mover mover) {
    const row_transfer& work = launch.transfer;
    if (refused(work.errors)) return;
    const unsigned pieces = launch.pieces_of_row;
    const std::uint64_t begin = (work.range == nullptr ? work.begin : work.range->begin) * pieces;
    const std::uint64_t end = (work.range == nullptr ? work.end : work.range->end) * pieces;
    const unsigned lane = threadIdx.x % launch.lanes;
    const std::uint64_t group = thread_number() / launch.lanes;
    const std::uint64_t groups = thread_count() / launch.lanes;
    for (std::uint64_t first = begin + group * rows_at_once; first < end; first += groups * rows_at_once) {
        const auto begin_row = [&](unsigned k) -> std::uint64_t {
            if (first + k >= end) return 0;
            const std::uint64_t offset = (first + k) % pieces * launch.piece_bytes;
            const std::uint64_t left = work.table.row_size_bytes - offset;
            return mover.begin_row(k, (first + k) / pieces,
                                   {offset, left < launch.piece_bytes ? left : launch.piece_bytes});
        };
        move_some(mover, begin_row, launch.lanes, lane);
    }
}

/// Moves rows whose size and addresses on both sides are multiples of 16 bytes.
struct aligned_mover {
    const unsigned char* from[rows_at_once];
    unsigned char* to[rows_at_once];

    __device__ static word load_at(const unsigned char* row, std::uint64_t at) {
        word value;
        value.whole = __ldcs(reinterpret_cast<const uint4*>(row) + at);
        return value;
    }
    __device__ word load(unsigned k, std::uint64_t at) const { return load_at(from[k], at); }
    __device__ void store(unsigned k, std::uint64_t at, const word& value) const {
        __stcs(reinterpret_cast<uint4*>(to[k]) + at, value.whole);
    }
};

/// Moves rows of any alignment in words that are aligned on one side, the source or the destination.
struct any_mover {
    word_row aligned_side[rows_at_once];
    unsigned char* other_side[rows_at_once];

    __device__ unsigned words_before(unsigned k) const { return words_before_in_line(aligned_side[k].row); }
    /// The address on the other side of word `at` of the k-th row. For the first word it may lie before the
    /// row.
    __device__ unsigned char* on_other_side(unsigned k, std::uint64_t at) const {
        return other_side[k] + at * word_bytes - aligned_side[k].before();
    }
};

template <bool Aligned>
struct gatherer;

template <>
struct gatherer<true> : aligned_mover {
    static constexpr direction own_direction = direction::gather;
    const row_transfer& work;
    __device__ explicit gatherer(const row_transfer& transfer) : work(transfer) {}

    __device__ unsigned words_before(unsigned k) const { return words_before_in_line(from[k]); }
    __device__ std::uint64_t begin_row(unsigned k, std::uint64_t index, const bytes_of_row& bytes) {
        if (is_repeated(work.order, index)) return 0;
        from[k] = row_of_table(work, index) + bytes.offset;
        to[k] = row_of_batch(work, position_of(work.order, index)) + bytes.offset;
        return bytes.size / word_bytes;
    }
};

template <>
struct gatherer<false> : any_mover {
    static constexpr direction own_direction = direction::gather;
    const row_transfer& work;
    __device__ explicit gatherer(const row_transfer& transfer) : work(transfer) {}

    __device__ std::uint64_t begin_row(unsigned k, std::uint64_t index, const bytes_of_row& bytes) {
        if (is_repeated(work.order, index)) return 0;
        aligned_side[k] = {row_of_table(work, index) + bytes.offset, bytes.size};
        other_side[k] = row_of_batch(work, position_of(work.order, index)) + bytes.offset;
        return aligned_side[k].count();
    }
    __device__ word load(unsigned k, std::uint64_t at) const {
        return load_from_table(work, aligned_side[k], at);
    }
    __device__ void store(unsigned k, std::uint64_t at, const word& value) const {
        cuda::store(on_other_side(k, at), value, aligned_side[k].begin(at), aligned_side[k].end(at));
    }
};

template <bool Aligned>
struct scatterer;

template <>
struct scatterer<true> : aligned_mover {
    static constexpr direction own_direction = direction::scatter;
    const row_transfer& work;
    __device__ explicit scatterer(const row_transfer& transfer) : work(transfer) {}

    __device__ unsigned words_before(unsigned k) const { return words_before_in_line(to[k]); }
    __device__ std::uint64_t begin_row(unsigned k, std::uint64_t index, const bytes_of_row& bytes) {
        if (!work.compact && is_overwritten(work.order, index)) return 0;
        from[k] = row_of_batch(work, position_of(work.order, index)) + bytes.offset;
        to[k] = row_of_table(work, index) + bytes.offset;
        return bytes.size / word_bytes;
    }
};

template <>
struct scatterer<false> : any_mover {
    static constexpr direction own_direction = direction::scatter;
    const row_transfer& work;
    __device__ explicit scatterer(const row_transfer& transfer) : work(transfer) {}

    __device__ std::uint64_t begin_row(unsigned k, std::uint64_t index, const bytes_of_row& bytes) {
        if (!work.compact && is_overwritten(work.order, index)) return 0;
        aligned_side[k] = {row_of_table(work, index) + bytes.offset, bytes.size};
        other_side[k] = row_of_batch(work, position_of(work.order, index)) + bytes.offset;
        return aligned_side[k].count();
    }
    __device__ word load(unsigned k, std::uint64_t at) const {
        return cuda::load(on_other_side(k, at), aligned_side[k].begin(at), aligned_side[k].end(at));
    }
    __device__ void store(unsigned k, std::uint64_t at, const word& value) const {
        cuda::store(aligned_side[k].at(at), value, aligned_side[k].begin(at), aligned_side[k].end(at));
    }
};

/// Copies repeated rows from the first position to the others, within device memory.
template <bool Aligned>
struct repeater;

/// The first index that is equal to the one at `index`.
__device__ std::uint64_t first_equal(const row_order& order, std::uint64_t index) {
    const std::uint64_t id = order.ids[index];
    std::uint64_t low = 0;
    std::uint64_t high = index;
    while (low < high) {
        const std::uint64_t middle = low + (high - low) / 2;
        if (order.ids[middle] < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

template <>
struct repeater<true> : aligned_mover {
    const row_transfer& work;
    __device__ explicit repeater(const row_transfer& transfer) : work(transfer) {}

    __device__ unsigned words_before(unsigned k) const { return words_before_in_line(to[k]); }
    __device__ std::uint64_t begin_row(unsigned k, std::uint64_t first, std::uint64_t index) {
        from[k] = row_of_batch(work, position_of(work.order, first));
        to[k] = row_of_batch(work, position_of(work.order, index));
        return work.table.row_size_bytes / word_bytes;
    }
};

template <>
struct repeater<false> : any_mover {
    const row_transfer& work;
    __device__ explicit repeater(const row_transfer& transfer) : work(transfer) {}

    __device__ std::uint64_t begin_row(unsigned k, std::uint64_t first, std::uint64_t index) {
        // words are aligned on the side that is written
        aligned_side[k] = {row_of_batch(work, position_of(work.order, index)), work.table.row_size_bytes};
        other_side[k] = row_of_batch(work, position_of(work.order, first));
        return aligned_side[k].count();
    }
    __device__ word load(unsigned k, std::uint64_t at) const {
        return cuda::load(on_other_side(k, at), aligned_side[k].begin(at), aligned_side[k].end(at));
    }
    __device__ void store(unsigned k, std::uint64_t at, const word& value) const {
        cuda::store(aligned_side[k].at(at), value, aligned_side[k].begin(at), aligned_side[k].end(at));
    }
};

/// Most calls have few repeated indices, so each thread checks one index of its own. The group of threads
/// then moves the repeated rows that its threads found. If there are fewer indices than threads, only some
/// threads of each group check one.
template <typename Mover>
__device__ void move_repeated_rows(const row_launch& launch, Mover mover) {
    const row_transfer& work = launch.transfer;
    if (refused(work.errors)) return;
    const unsigned lanes = launch.lanes;
    const unsigned lane = threadIdx.x % lanes;
    const unsigned group_in_warp = threadIdx.x % warpSize - lane;
    const unsigned group_mask = (~0U >> (warpSize - lanes)) << group_in_warp;
    const std::uint64_t groups = thread_count() / lanes;
    const std::uint64_t share = (work.end - work.begin + groups - 1) / groups;
    const unsigned looking = share < lanes ? static_cast<unsigned>(share) : lanes;
    for (std::uint64_t begin = work.begin + thread_number() / lanes * looking; begin < work.end;
         begin += groups * looking) {
        const std::uint64_t index = begin + lane;
        const bool repeated = lane < looking && index < work.end && is_repeated(work.order, index);
        const std::uint64_t first = repeated ? first_equal(work.order, index) : 0;
        unsigned left = __ballot_sync(group_mask, repeated) >> group_in_warp;
        const auto begin_next = [&](unsigned k) -> std::uint64_t {
            if (left == 0) return 0;
            const int found = __ffs(static_cast<int>(left)) - 1;
            left &= left - 1;
            const std::uint64_t from = __shfl_sync(group_mask, first, found, static_cast<int>(lanes));
            return mover.begin_row(k, from, begin + found);
        };
        while (left != 0)
            move_some(mover, begin_next, lanes, lane);
    }
}

/// Checks all indices in each block, so that no block has to wait for another one. The first block reports
/// the wrong ones. Called by all threads of a block.
__device__ bool are_valid(const row_transfer& work) {
    __shared__ unsigned long long count;
    __shared__ unsigned long long complement;
    if (threadIdx.x == 0) count = complement = 0;
    error_count own;
#pragma unroll 8
    for (std::uint64_t i = threadIdx.x; i < work.order.count; i += blockDim.x) {
        const bool is_wrong = work.order.ids[i] >= work.table.row_count;
        if (is_wrong && own.count == 0) own.complement = ~static_cast<unsigned long long>(i);
        own.count += is_wrong ? 1 : 0;
    }
    if (__syncthreads_or(own.count != 0) == 0) return true;
    if (blockIdx.x != 0) return false;
    if (own.count != 0) {
        atomicAdd(&count, own.count);
        atomicMax(&complement, own.complement);
    }
    __syncthreads();
    if (threadIdx.x == 0) report_outside({count, complement}, work.order.ids, *work.report);
    return false;
}

template <bool Aligned, bool InPieces>
__global__ void __launch_bounds__(gather_threads(Aligned)) gather(row_launch launch) {
    if (launch.transfer.report != nullptr && !are_valid(launch.transfer)) return;
    if constexpr (InPieces) {
        move_pieces(launch, gatherer<Aligned>(launch.transfer));
    } else {
        move_rows(launch, gatherer<Aligned>(launch.transfer));
    }
}

template <bool Aligned, bool InPieces>
__global__ void __launch_bounds__(row_threads) scatter(row_launch launch) {
    if constexpr (InPieces) {
        move_pieces(launch, scatterer<Aligned>(launch.transfer));
    } else {
        move_rows(launch, scatterer<Aligned>(launch.transfer));
    }
}

template <bool Aligned>
__global__ void __launch_bounds__(row_threads) repeat(row_launch launch) {
    move_repeated_rows(launch, repeater<Aligned>(launch.transfer));
}

template <typename... Parameters>
const void* address(void (*kernel)(Parameters...)) {
    return reinterpret_cast<const void*>(kernel);
}

}  // namespace

const void* check_rows() {
    return address(&check);
}

const void* refuse_repeated_rows() {
    return address(&refuse_repeated);
}

const void* gather_rows(bool aligned, bool in_pieces) {
    if (in_pieces) return aligned ? address(&gather<true, true>) : address(&gather<false, true>);
    return aligned ? address(&gather<true, false>) : address(&gather<false, false>);
}

const void* repeat_rows(bool aligned) {
    return aligned ? address(&repeat<true>) : address(&repeat<false>);
}

const void* scatter_rows(bool aligned, bool in_pieces) {
    if (in_pieces) return aligned ? address(&scatter<true, true>) : address(&scatter<false, true>);
    return aligned ? address(&scatter<true, false>) : address(&scatter<false, false>);
}

}  // namespace pinflow::detail::cuda
