#include "src/device/digest_host.hpp"

#include <tbb/blocked_range.h>
#include <tbb/parallel_reduce.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "src/device/digest_mix.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t word_bytes = sizeof(std::uint64_t);

std::uint64_t sum_of_words(const std::byte* row, std::uint64_t first, std::uint64_t last) noexcept {
    std::uint64_t sum = 0;
    for (std::uint64_t i = first; i < last; ++i) {
        std::uint64_t word = 0;
        std::memcpy(&word, row + i * word_bytes, word_bytes);
        sum += digest_word(word, i);
    }
    return sum;
}

std::uint64_t hash_of_row(const std::byte* row, std::uint64_t size_bytes) {
    const std::uint64_t whole_words = size_bytes / word_bytes;
    std::uint64_t hash = size_bytes;
    if (const std::uint64_t rest = size_bytes % word_bytes; rest != 0) {
        std::uint64_t word = 0;
        std::memcpy(&word, row + whole_words * word_bytes, rest);
        hash += digest_word(word, whole_words);
    }
    constexpr std::uint64_t words_a_task = 1 << 17;  // 1 MiB: a long row is worth several cores
    if (whole_words < 2 * words_a_task) return hash + sum_of_words(row, 0, whole_words);
    return hash + tbb::parallel_reduce(
                      tbb::blocked_range<std::uint64_t>(0, whole_words, words_a_task), std::uint64_t{0},
                      [&](const auto& range, std::uint64_t sum) {
                          return sum + sum_of_words(row, range.begin(), range.end());
                      },
                      std::plus<>());
}

}  // namespace

std::uint64_t digest_of_rows(std::span<const digest_array> arrays, std::uint64_t row_count) {
    std::uint64_t sample_bytes = 1;
    for (const digest_array& array : arrays) {
        sample_bytes += array.row_size_bytes;
    }
    const std::uint64_t samples_a_task = std::max<std::uint64_t>(1, (std::uint64_t{1} << 18) / sample_bytes);
    return tbb::parallel_reduce(
        tbb::blocked_range<std::uint64_t>(0, row_count, samples_a_task), std::uint64_t{0},
        [&](const auto& range, std::uint64_t sum) {
            for (std::uint64_t row = range.begin(); row != range.end(); ++row) {
                std::uint64_t parts = 0;
                for (std::size_t a = 0; a < arrays.size(); ++a) {
                    const std::uint64_t size = arrays[a].row_size_bytes;
                    parts += digest_part(hash_of_row(arrays[a].rows + row * size, size), a);
                }
                sum += digest_mix(parts);
            }
            return sum;
        },
        std::plus<>());
}

}  // namespace pinflow::detail
