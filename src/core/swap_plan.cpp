#include "src/core/swap_plan.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pinflow::detail {

namespace {

std::uint16_t swapped(std::uint16_t word) noexcept {
    return __builtin_bswap16(word);
}
std::uint32_t swapped(std::uint32_t word) noexcept {
    return __builtin_bswap32(word);
}
std::uint64_t swapped(std::uint64_t word) noexcept {
    return __builtin_bswap64(word);
}

template <typename Word>
void swap_word(std::byte* data) noexcept {
    Word word;
    std::memcpy(&word, data, sizeof(Word));
    word = swapped(word);
    std::memcpy(data, &word, sizeof(Word));
}

/// Swaps `count` contiguous words in each of `repetitions` positions.
template <typename Word>
void swap_words(std::byte* data, std::uint64_t count, std::uint64_t repetitions, std::uint64_t stride_bytes) {
    if (count * sizeof(Word) == stride_bytes) {
        count *= repetitions;
        repetitions = 1;
    }
    for (; repetitions > 0; --repetitions, data += stride_bytes) {
        if (count == 1) {  // most fields are one number: no inner loop for it
            swap_word<Word>(data);
            continue;
        }
        for (std::uint64_t index = 0; index < count; ++index)
            swap_word<Word>(data + index * sizeof(Word));
    }
}

/// The same for numpy's long double.
void swap_long_words(std::byte* data, std::uint64_t size_bytes, std::uint64_t count,
                     std::uint64_t repetitions, std::uint64_t stride_bytes) {
    for (; repetitions > 0; --repetitions, data += stride_bytes) {
        for (std::uint64_t index = 0; index < count; ++index) {
            std::reverse(data + index * size_bytes, data + (index + 1) * size_bytes);
        }
    }
}

}  // namespace

swap_plan::swap_plan(const dtype& type) : item_size_bytes_(type.size_bytes()) {
    append_steps(steps_, type, 0, 1);
}

void swap_plan::append_steps(std::vector<step>& steps, const dtype& type, std::uint64_t offset_bytes,
                             std::uint64_t count) {
    if (type.is_little_endian() || count == 0 || type.size_bytes() == 0) return;
    if (!type.is_structured()) {
        const std::uint64_t size_bytes = type.swap_size_bytes();
        count *= type.size_bytes() / size_bytes;
        // contiguous numbers of one size are one step, even across fields
        if (!steps.empty() && steps.back().nested.empty() && steps.back().size_bytes == size_bytes &&
            steps.back().offset_bytes + steps.back().count * size_bytes == offset_bytes) {
            steps.back().count += count;
        } else {
            steps.push_back({offset_bytes, size_bytes, count, {}});
        }
    } else if (count == 1) {
        for (const dtype_field& field : type.fields()) {
            append_steps(steps, field.type, offset_bytes + field.offset_bytes,
                         field.size_bytes() / std::max<std::uint64_t>(field.type.size_bytes(), 1));
        }
    } else {  // a nested loop: a short header can declare any number of repetitions
        step repeated{offset_bytes, type.size_bytes(), count, {}};
        append_steps(repeated.nested, type, 0, 1);
        if (!repeated.nested.empty()) steps.push_back(std::move(repeated));
    }
}

void swap_plan::apply_steps(std::span<const step> steps, std::byte* first, std::uint64_t repetitions,
                            std::uint64_t stride_bytes) noexcept {
    for (const step& now : steps) {
        std::byte* const data = first + now.offset_bytes;
        if (!now.nested.empty()) {
            for (std::uint64_t index = 0; index < repetitions; ++index) {
                apply_steps(now.nested, data + index * stride_bytes, now.count, now.size_bytes);
            }
        } else if (now.size_bytes == 2) {
            swap_words<std::uint16_t>(data, now.count, repetitions, stride_bytes);
        } else if (now.size_bytes == 4) {
            swap_words<std::uint32_t>(data, now.count, repetitions, stride_bytes);
        } else if (now.size_bytes == 8) {
            swap_words<std::uint64_t>(data, now.count, repetitions, stride_bytes);
        } else {
            swap_long_words(data, now.size_bytes, now.count, repetitions, stride_bytes);
        }
    }
}

void swap_plan::apply(std::span<std::byte> elements) const noexcept {
    if (steps_.empty()) return;
    // field by field, for 16 KiB of elements at a time, which fit in the L1 cache
    constexpr std::uint64_t cached_bytes = 16 << 10;
    const std::uint64_t at_once = std::max<std::uint64_t>(cached_bytes / item_size_bytes_, 1);
    const std::uint64_t count = elements.size() / item_size_bytes_;
    for (std::uint64_t index = 0; index < count; index += at_once) {
        apply_steps(steps_, elements.data() + index * item_size_bytes_, std::min(at_once, count - index),
                    item_size_bytes_);
    }
}

}  // namespace pinflow::detail
