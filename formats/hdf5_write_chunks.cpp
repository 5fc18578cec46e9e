#include "formats/hdf5_write_chunks.hpp"

#include <fmt/format.h>
#include <libdeflate.h>
#include <tbb/parallel_pipeline.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "src/core/checked.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/strided_reader.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t default_chunk_bytes = std::uint64_t{1} << 20;
/// Upper bound on the bytes of the bands collected and encoded together, unless a single band is larger.
constexpr std::uint64_t max_batch_bytes = std::uint64_t{64} << 20;
/// Small chunks are encoded in batches of about this size: starting a pipeline for fewer of them would take
/// longer than encoding them.
constexpr std::uint64_t min_batch_bytes = std::uint64_t{1} << 20;

constexpr std::uint32_t nothing_skipped = 0;
constexpr std::uint32_t all_skipped = 0b11;

/// The first axis along which chunks are longer than 1; the last axis if there is none.
std::size_t first_long_axis(const shape_vector& chunk_shape) {
    const auto found = std::ranges::find_if(chunk_shape, [](std::uint64_t length) { return length > 1; });
    return std::min(static_cast<std::size_t>(found - chunk_shape.begin()), chunk_shape.size() - 1);
}

shape_vector from_axis(const shape_vector& shape, std::size_t axis) {
    return {shape.begin() + static_cast<std::ptrdiff_t>(axis), shape.end()};
}

}  // namespace

shape_vector hdf5_default_chunk_shape(const shape_vector& shape, std::uint64_t element_bytes) {
    shape_vector chunk_shape(shape.size(), 1);
    std::uint64_t bytes = element_bytes;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        chunk_shape[axis] = std::clamp<std::uint64_t>(default_chunk_bytes / bytes, 1, shape[axis]);
        if (chunk_shape[axis] < shape[axis]) break;
        bytes *= shape[axis];
    }
    return chunk_shape;
}

// ---- encoding --------------------------------------------------------------------------------------------

/// Encodes one chunk at a time, in memory that is reused for the next one.
struct hdf5_chunk_writer::encoder {
    encoder() = default;
    encoder(const encoder&) = delete;
    encoder& operator=(const encoder&) = delete;
    ~encoder() { ::libdeflate_free_compressor(compressor); }

    /// Sets `stored` and `filter_mask`. The bytes of `stored` are valid until the next call, or are those of
    /// `chunk`.
    void encode(std::span<const std::byte> chunk, std::uint64_t element_bytes, unsigned deflate_level);

    ::libdeflate_compressor* compressor = nullptr;
    scratch_memory cut;
    scratch_memory shuffled;
    scratch_memory deflated;
    std::span<const std::byte> stored;
    std::uint32_t filter_mask = nothing_skipped;
};

void hdf5_chunk_writer::encoder::encode(std::span<const std::byte> chunk, std::uint64_t element_bytes,
                                        unsigned deflate_level) {
    if (compressor == nullptr) compressor = ::libdeflate_alloc_compressor(static_cast<int>(deflate_level));
    if (compressor == nullptr) throw std::bad_alloc();
    std::span<const std::byte> input = chunk;
    if (element_bytes > 1) {
        std::byte* const to = shuffled.reserve(chunk.size());
        hdf5_shuffle(chunk, element_bytes, to);
        input = {to, chunk.size()};
    }
    // the output has room for a smaller result only: a chunk that does not shrink is stored as it is
    const std::size_t room_bytes = chunk.size() - 1;
    std::byte* const to = deflated.reserve(room_bytes);
    const std::size_t size_bytes =
        ::libdeflate_zlib_compress(compressor, input.data(), input.size(), to, room_bytes);
    const bool shrinks = size_bytes > 0;
    stored = shrinks ? std::span<const std::byte>(to, size_bytes) : chunk;
    filter_mask = shrinks ? nothing_skipped : all_skipped;
}

// ---- cutting ---------------------------------------------------------------------------------------------

hdf5_chunk_writer::hdf5_chunk_writer(const shape_vector& shape, const shape_vector& chunk_shape,
                                     std::uint64_t element_bytes, unsigned deflate_level,
                                     hdf5_store_chunk store)
    : hdf5_chunk_writer(first_long_axis(chunk_shape), shape, chunk_shape, element_bytes, deflate_level,
                        std::move(store)) {}

hdf5_chunk_writer::hdf5_chunk_writer(std::size_t grid_axis, const shape_vector& shape,
                                     const shape_vector& chunk_shape, std::uint64_t element_bytes,
                                     unsigned deflate_level, hdf5_store_chunk store)
    : grid_axis_(grid_axis),
      block_shape_(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(grid_axis)),
      grid_(from_axis(shape, grid_axis), from_axis(chunk_shape, grid_axis), element_bytes),
      box_(grid_),
      bands_per_block_(grid_.chunks_along(0)),
      band_count_(bands_per_block_ * element_count(block_shape_)),
      element_bytes_(element_bytes),
      deflate_level_(deflate_level),
      store_(std::move(store)) {
    start_worker_threads();
    // two chunks for each core: one is encoded, the other waits for its turn to be stored
    const auto threads = static_cast<std::uint64_t>(tbb::this_task_arena::max_concurrency());
    // half of the memory that is left, in four parts: one for the rows, three for the encoders
    const std::uint64_t batch_bytes = std::min(max_batch_bytes, read_available_memory().size_bytes / 2 / 4);
    const std::uint64_t max_chunks = std::max<std::uint64_t>(batch_bytes / grid_.chunk_bytes(), 1);
    const std::uint64_t encoders = std::min(max_chunks, 2 * threads);
    const std::uint64_t chunks =
        std::max(encoders, std::min(min_batch_bytes, batch_bytes) / grid_.chunk_bytes());
    max_batch_bands_ = std::clamp<std::uint64_t>(chunks / grid_.chunks_per_band(), 1, band_count_);
    const std::uint64_t collected_bytes = max_batch_bands_ * grid_.rows_per_chunk() * box_.row_bytes();
    const std::uint64_t needed_bytes = saturated(3 * encoders, grid_.chunk_bytes(), collected_bytes);
    require_memory(needed_bytes,
                   fmt::format("cannot write chunks of {} bytes: that takes {} bytes of memory",
                               grid_.chunk_bytes(), needed_bytes),
                   "choose a smaller chunk shape");
    for (std::uint64_t index = 0; index < encoders; ++index)
        encoders_.push_back(std::make_unique<encoder>());
    batch_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(collected_bytes));
    begin_batch();
}

hdf5_chunk_writer::~hdf5_chunk_writer() = default;

/// The offset of a band in the dataset's elements, in bytes.
std::uint64_t hdf5_chunk_writer::band_begin(std::uint64_t band) const noexcept {
    const std::uint64_t rows =
        band / bands_per_block_ * grid_.shape()[0] + band % bands_per_block_ * grid_.rows_per_chunk();
    return rows * box_.row_bytes();
}

std::uint64_t hdf5_chunk_writer::band_rows(std::uint64_t band) const noexcept {
    const std::uint64_t first = band % bands_per_block_ * grid_.rows_per_chunk();
    return std::min(grid_.rows_per_chunk(), grid_.shape()[0] - first);
}

void hdf5_chunk_writer::begin_batch() {
    end_band_ = first_band_ + std::min(max_batch_bands_, band_count_ - first_band_);
    batch_bytes_ = band_begin(end_band_) - band_begin(first_band_);
    collected_bytes_ = 0;
}

void hdf5_chunk_writer::write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const std::size_t count = std::min<std::uint64_t>(bytes.size(), batch_bytes_ - collected_bytes_);
        std::memcpy(batch_.get() + collected_bytes_, bytes.data(), count);
        collected_bytes_ += count;
        bytes = bytes.subspan(count);
        if (collected_bytes_ < batch_bytes_) continue;
        store_batch();
        first_band_ = end_band_;
        begin_batch();
    }
}

void hdf5_chunk_writer::store_batch() {
    std::uint64_t next = first_band_ * grid_.chunks_per_band();
    const std::uint64_t end = end_band_ * grid_.chunks_per_band();
    // There are at most as many chunks in flight as encoders, and chunks finish in order. So the previous
    // chunk of an encoder has finished when the next one gets it.
    const auto encoder_of = [&](std::uint64_t chunk) -> encoder& {
        return *encoders_[chunk % encoders_.size()];
    };
    const auto take = [&](tbb::flow_control& control) -> std::uint64_t {
        if (next == end) {
            control.stop();
            return 0;
        }
        return next++;
    };
    const auto encode_one = [&](std::uint64_t chunk) {
        encode(chunk, encoder_of(chunk));
        return chunk;
    };
    const auto store_one = [&](std::uint64_t chunk) {
        const encoder& of = encoder_of(chunk);
        store_(first_element(chunk), of.filter_mask, of.stored);
    };
    // isolated from the caller's other tasks, so that a thread that waits here does not begin one of them,
    // and from the caller's cancellation, which would end this with chunks missing
    tbb::task_group_context context(tbb::task_group_context::isolated);
    tbb::this_task_arena::isolate([&] {
        using tbb::filter_mode;
        tbb::parallel_pipeline(
            encoders_.size(),
            tbb::make_filter<void, std::uint64_t>(filter_mode::serial_in_order, take) &
                tbb::make_filter<std::uint64_t, std::uint64_t>(filter_mode::parallel, encode_one) &
                tbb::make_filter<std::uint64_t, void>(filter_mode::serial_in_order, store_one),
            context);
    });
}

void hdf5_chunk_writer::encode(std::uint64_t chunk, encoder& by) const {
    const std::uint64_t band = chunk / grid_.chunks_per_band();
    const std::uint64_t rows = band_rows(band);
    const std::byte* const source = batch_.get() + (band_begin(band) - band_begin(first_band_));
    const std::uint64_t chunk_bytes = grid_.chunk_bytes();
    if (grid_.holds_whole_rows() && rows == grid_.rows_per_chunk()) {
        return by.encode({source, chunk_bytes}, element_bytes_, deflate_level_);
    }
    std::byte* const cut = by.cut.reserve(chunk_bytes);
    std::memset(cut, 0, chunk_bytes);
    // a part maps a chunk's bytes to rows; here they are copied the other way
    hdf5_chunk_part part = box_.part(chunk % grid_.chunks_per_band());
    std::swap(part.source_offset, part.destination_offset);
    for (hdf5_chunk_part::axis& axis : std::span(part.axes).first(part.axis_count))
        std::swap(axis.source_stride, axis.destination_stride);
    part.copy(source + part.source_offset, box_.row_bytes(), cut, grid_.chunk_row_bytes(), rows);
    by.encode({cut, chunk_bytes}, element_bytes_, deflate_level_);
}

shape_vector hdf5_chunk_writer::first_element(std::uint64_t chunk) const {
    const std::uint64_t chunks_per_block = bands_per_block_ * grid_.chunks_per_band();
    shape_vector result(grid_axis_);
    std::uint64_t block = chunk / chunks_per_block;
    for (std::size_t axis = grid_axis_; axis-- > 0;) {
        result[axis] = block % block_shape_[axis];
        block /= block_shape_[axis];
    }
    const shape_vector within = grid_.first_element(chunk % chunks_per_block);
    result.insert(result.end(), within.begin(), within.end());
    return result;
}

// ---- shuffle ---------------------------------------------------------------------------------------------

namespace {

/// Shuffles the elements [first, count).
void shuffle_by_byte(const std::byte* elements, std::uint64_t count, std::uint64_t element_bytes,
                     std::uint64_t first, std::byte* planes) noexcept {
    // a block of elements that stays in the L1 cache during the passes over its bytes
    const std::uint64_t block = std::max<std::uint64_t>((16 << 10) / element_bytes, 16);
    for (; first < count; first += block) {
        const std::uint64_t end = std::min(count, first + block);
        for (std::uint64_t plane = 0; plane < element_bytes; ++plane) {
            const std::byte* const from = elements + plane;
            std::byte* const to = planes + plane * count;
            for (std::uint64_t index = first; index < end; ++index)
                to[index] = from[index * element_bytes];
        }
    }
}

#ifdef __SSE2__
/// Shuffles as many elements as fit whole vectors of 16.
/// @return how many were shuffled.
template <std::size_t ElementBytes>
std::uint64_t shuffle_by_vector(const std::byte* elements, std::uint64_t count, std::byte* planes) noexcept {
    constexpr std::uint64_t at_once = 16;
    std::uint64_t first = 0;
    for (; count - first >= at_once; first += at_once) {
        __m128i now[ElementBytes];
        const auto* const from = reinterpret_cast<const __m128i*>(elements + first * ElementBytes);
        for (std::size_t index = 0; index < ElementBytes; ++index)
            now[index] = _mm_loadu_si128(from + index);
        // Each pass interleaves the first half with the second: the bits of a byte's index rotate left by
        // one. After four passes, the element number (of 16) is in the lowest bits.
        for (int pass = 0; pass < 4; ++pass) {
            __m128i next[ElementBytes];
            for (std::size_t index = 0; index < ElementBytes / 2; ++index) {
                next[2 * index] = _mm_unpacklo_epi8(now[index], now[index + ElementBytes / 2]);
                next[2 * index + 1] = _mm_unpackhi_epi8(now[index], now[index + ElementBytes / 2]);
            }
            std::copy(std::begin(next), std::end(next), std::begin(now));
        }
        for (std::size_t plane = 0; plane < ElementBytes; ++plane)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(planes + plane * count + first), now[plane]);
    }
    return first;
}
#endif

}  // namespace

void hdf5_shuffle(std::span<const std::byte> elements, std::uint64_t element_bytes,
                  std::byte* destination) noexcept {
    const std::uint64_t count = elements.size() / element_bytes;
    std::uint64_t done = 0;
#ifdef __SSE2__
    switch (element_bytes) {
        case 2:
            done = shuffle_by_vector<2>(elements.data(), count, destination);
            break;
        case 4:
            done = shuffle_by_vector<4>(elements.data(), count, destination);
            break;
        case 8:
            done = shuffle_by_vector<8>(elements.data(), count, destination);
            break;
        case 16:
            done = shuffle_by_vector<16>(elements.data(), count, destination);
            break;
        default:
            break;
    }
#endif
    shuffle_by_byte(elements.data(), count, element_bytes, done, destination);
}

}  // namespace pinflow::detail
