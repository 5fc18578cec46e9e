#include "src/rows/place_rows.hpp"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pinflow::detail {

namespace {

bool counts(const placed_rows& rows, std::uint64_t index, of_equal which) noexcept {
    switch (which) {
        case of_equal::all:
            return true;
        case of_equal::first:
            return index == 0 || rows.ids[index - 1] != rows.ids[index];
        case of_equal::last:
            return index + 1 == rows.ids.size() || rows.ids[index + 1] != rows.ids[index];
    }
    return true;
}

#ifdef __SSE2__

constexpr std::size_t line_bytes = 64;

/// Like memcpy, with whole cache lines written past the caches.
void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) noexcept {
    constexpr std::size_t least_bytes = 2 * line_bytes;
    constexpr std::size_t word_bytes = sizeof(__m128i);
    if (size_bytes < least_bytes) {
        std::memcpy(destination, source, size_bytes);
        return;
    }
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(destination) % word_bytes;
    std::memcpy(destination, source, head);
    const std::size_t end = size_bytes - (size_bytes - head) % line_bytes;
    for (std::size_t at = head; at < end; at += line_bytes) {
        const auto* const from = reinterpret_cast<const __m128i*>(source + at);
        auto* const to = reinterpret_cast<__m128i*>(destination + at);
        const __m128i first = _mm_loadu_si128(from);
        const __m128i second = _mm_loadu_si128(from + 1);
        const __m128i third = _mm_loadu_si128(from + 2);
        const __m128i fourth = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, first);
        _mm_stream_si128(to + 1, second);
        _mm_stream_si128(to + 2, third);
        _mm_stream_si128(to + 3, fourth);
    }
    std::memcpy(destination + end, source + end, size_bytes - end);
}

/// The copies are seen by whoever is told of them from now on.
void finish_streaming() noexcept {
    _mm_sfence();
}

void prefetch(const std::byte* data, std::size_t size_bytes) noexcept {
    for (std::size_t at = 0; at < size_bytes; at += line_bytes)
        _mm_prefetch(reinterpret_cast<const char*>(data + at), _MM_HINT_T0);
}

#else

void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) noexcept {
    std::memcpy(destination, source, size_bytes);
}
void finish_streaming() noexcept {}
void prefetch(const std::byte*, std::size_t) noexcept {}

#endif

}  // namespace

void gather_on_cpu(const std::byte* table, const placed_rows& rows, of_equal which,
                   std::byte* slot) noexcept {
    // so many rows ahead, and of each so much, as random rows are waited for (measured: RESULTS.md)
    constexpr std::uint64_t ahead = 8;
    constexpr std::uint64_t most_prefetched_bytes = 1024;
    const std::uint64_t size_bytes = rows.row_size_bytes;
    const std::uint64_t prefetched_bytes = std::min(size_bytes, most_prefetched_bytes);
    for (std::uint64_t index = rows.begin; index < rows.end; ++index) {
        if (index + ahead < rows.end)
            prefetch(table + rows.ids[index + ahead] * size_bytes, prefetched_bytes);
        if (!counts(rows, index, which)) continue;
        stream_copy(slot + (index - rows.begin) * size_bytes, table + rows.ids[index] * size_bytes,
                    size_bytes);
    }
    finish_streaming();
}

void scatter_on_cpu(std::byte* table, const placed_rows& rows, of_equal which,
                    const std::byte* slot) noexcept {
    const std::uint64_t size_bytes = rows.row_size_bytes;
    for (std::uint64_t index = rows.begin; index < rows.end; ++index) {
        if (!counts(rows, index, which)) continue;
        stream_copy(table + rows.ids[index] * size_bytes, slot + (index - rows.begin) * size_bytes,
                    size_bytes);
    }
    finish_streaming();
}

}  // namespace pinflow::detail
