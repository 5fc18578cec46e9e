#include "src/core/row_copy.hpp"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pinflow::detail {

namespace {

#ifdef __SSE2__
constexpr std::size_t line_bytes = 64;
#endif

/// Rows of a compile-time size: one or two loads and stores each.
template <std::size_t SizeBytes>
void copy_small(std::span<const std::byte* const> rows, std::byte* destination) noexcept {
    for (const std::byte* const row : rows) {
        std::memcpy(destination, row, SizeBytes);
        destination += SizeBytes;
    }
}

}  // namespace

#ifdef __SSE2__

void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) noexcept {
    constexpr std::size_t min_bytes = 2 * line_bytes;
    constexpr std::size_t word_bytes = sizeof(__m128i);
    if (size_bytes < min_bytes) {
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

void finish_streaming() noexcept {
    _mm_sfence();
}

void prefetch_row(const std::byte* row, std::uint64_t row_size_bytes) noexcept {
    constexpr std::uint64_t max_bytes = 1024;
    for (std::size_t at = 0; at < std::min(row_size_bytes, max_bytes); at += line_bytes)
        _mm_prefetch(reinterpret_cast<const char*>(row + at), _MM_HINT_T0);
}

#else

void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) noexcept {
    std::memcpy(destination, source, size_bytes);
}
void finish_streaming() noexcept {}
void prefetch_row(const std::byte*, std::uint64_t) noexcept {}

#endif

void copy_rows(std::span<const std::byte* const> rows, std::uint64_t row_size_bytes,
               std::byte* destination) noexcept {
    switch (row_size_bytes) {
        case 1:
            return copy_small<1>(rows, destination);
        case 2:
            return copy_small<2>(rows, destination);
        case 4:
            return copy_small<4>(rows, destination);
        case 8:
            return copy_small<8>(rows, destination);
        case 12:
            return copy_small<12>(rows, destination);
        case 16:
            return copy_small<16>(rows, destination);
        default:
            break;
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (i + prefetched_rows < rows.size()) prefetch_row(rows[i + prefetched_rows], row_size_bytes);
        std::memcpy(destination, rows[i], row_size_bytes);
        destination += row_size_bytes;
    }
}

}  // namespace pinflow::detail
