#include "src/device/digest_host.hpp"

#include <tbb/blocked_range.h>
#include <tbb/parallel_reduce.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>

#include "src/core/fault_guard.hpp"
#include "src/core/worker_threads.hpp"
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

constexpr std::uint64_t words_per_task = 1 << 17;  // 1 MiB: a long row is worth several cores

bool is_long(const digest_array& array) noexcept {
    return array.row_size_bytes / word_bytes >= 2 * words_per_task;
}

/// The contribution of the row's size, and of the bytes after its last whole word, to its hash.
std::uint64_t hash_of_rest(const std::byte* row, std::uint64_t size_bytes) noexcept {
    const std::uint64_t whole_words = size_bytes / word_bytes;
    const std::uint64_t rest = size_bytes % word_bytes;
    if (rest == 0) return size_bytes;
    std::uint64_t word = 0;
    std::memcpy(&word, row + whole_words * word_bytes, rest);
    return size_bytes + digest_word(word, whole_words);
}

std::uint64_t hash_of_short_row(const std::byte* row, std::uint64_t size_bytes) noexcept {
    return hash_of_rest(row, size_bytes) + sum_of_words(row, 0, size_bytes / word_bytes);
}

/// Thrown if a page of the mapping that a task reads no longer exists.
struct lost_pages {};

/// Calls `work` under the fault guard. On a fault the guard leaves it without unwinding, so `work` must own
/// nothing.
template <typename Work>
std::uint64_t guarded(const Work& work) {
    std::uint64_t result = 0;
    if (!run_guarded([&] { result = work(); })) throw lost_pages();
    return result;
}

std::uint64_t hash_of_long_row(const std::byte* row, std::uint64_t size_bytes) {
    const std::uint64_t rest = guarded([&] { return hash_of_rest(row, size_bytes); });
    return rest + tbb::parallel_reduce(
                      tbb::blocked_range<std::uint64_t>(0, size_bytes / word_bytes, words_per_task),
                      std::uint64_t{0},
                      [&](const auto& range, std::uint64_t sum) {
                          return sum + guarded([&] { return sum_of_words(row, range.begin(), range.end()); });
                      },
                      std::plus<>());
}

std::uint64_t digest_of_short_rows(std::span<const digest_array> arrays, std::uint64_t first,
                                   std::uint64_t last) noexcept {
    std::uint64_t sum = 0;
    for (std::uint64_t row = first; row != last; ++row) {
        std::uint64_t parts = 0;
        for (std::size_t a = 0; a < arrays.size(); ++a) {
            const std::uint64_t size = arrays[a].row_size_bytes;
            parts += digest_part(hash_of_short_row(arrays[a].rows + row * size, size), a);
        }
        sum += digest_mix(parts);
    }
    return sum;
}

std::uint64_t digest_of_long_rows(std::span<const digest_array> arrays, std::uint64_t first,
                                  std::uint64_t last) {
    std::uint64_t sum = 0;
    for (std::uint64_t row = first; row != last; ++row) {
        std::uint64_t parts = 0;
        for (std::size_t a = 0; a < arrays.size(); ++a) {
            const std::uint64_t size = arrays[a].row_size_bytes;
            const std::byte* const data = arrays[a].rows + row * size;
            const std::uint64_t hash = is_long(arrays[a])
                                           ? hash_of_long_row(data, size)
                                           : guarded([&] { return hash_of_short_row(data, size); });
            parts += digest_part(hash, a);
        }
        sum += digest_mix(parts);
    }
    return sum;
}

}  // namespace

std::optional<std::uint64_t> digest_of_rows(std::span<const digest_array> arrays, std::uint64_t row_count) {
    std::uint64_t sample_bytes = 1;
    for (const digest_array& array : arrays) {
        sample_bytes += array.row_size_bytes;
    }
    const std::uint64_t samples_per_task =
        std::max<std::uint64_t>(1, (std::uint64_t{1} << 18) / sample_bytes);
    const bool has_long = std::ranges::any_of(arrays, is_long);
    try {
        start_worker_threads();
        // isolated from the caller's cancellation, which would leave rows out of the digest
        tbb::task_group_context context(tbb::task_group_context::isolated);
        return tbb::parallel_reduce(
            tbb::blocked_range<std::uint64_t>(0, row_count, samples_per_task), std::uint64_t{0},
            [&](const auto& range, std::uint64_t sum) {
                // the parts of a long row are tasks, and a task must not begin under the guard of another
                // task
                if (has_long) return sum + digest_of_long_rows(arrays, range.begin(), range.end());
                return sum +
                       guarded([&] { return digest_of_short_rows(arrays, range.begin(), range.end()); });
            },
            std::plus<>(), context);
    } catch (const lost_pages&) {
        return std::nullopt;
    }
}

}  // namespace pinflow::detail
