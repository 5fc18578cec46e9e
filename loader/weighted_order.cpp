#include "loader/weighted_order.hpp"

#include <Random123/philox.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "pinflow/error.hpp"

namespace pinflow::detail {

namespace {

__extension__ using uint128 = unsigned __int128;

/// floor(fraction / 2^64 * size)
constexpr std::uint64_t scale(std::uint64_t fraction, std::uint64_t size) noexcept {
    return static_cast<std::uint64_t>((uint128{fraction} * size) >> 64);
}

/// Converts weights to proportional whole numbers, rounded down. Before rounding, their sum is from 2^61 to
/// 2^62. The floating-point sum only chooses a power of two, so that all machines get the same numbers.
/// @throws invalid_argument for a weight that is negative or not finite.
std::vector<std::uint64_t> whole_numbers(std::span<const double> weights) {
    double largest = 0;
    for (std::uint64_t row = 0; row < weights.size(); ++row) {
        if (!std::isfinite(weights[row]) || weights[row] < 0) {
            throw invalid_argument(
                fmt::format("cannot draw rows by weight: the weight of row {} is {}, and must be finite and "
                            "not negative",
                            row, weights[row]));
        }
        largest = std::max(largest, weights[row]);
    }
    std::vector<std::uint64_t> result(weights.size());
    if (largest == 0) return result;
    // first scale all weights to values below 1, so that their sum is finite
    const int to_one = -std::ilogb(largest) - 1;
    double sum = 0;
    for (const double weight : weights) {
        sum += std::ldexp(weight, to_one);
    }
    const int to_sum = to_one + 61 - std::ilogb(sum);
    std::ranges::transform(weights, result.begin(), [to_sum](double weight) {
        return static_cast<std::uint64_t>(std::ldexp(weight, to_sum));
    });
    return result;
}

}  // namespace

weighted_order::weighted_order(std::span<const double> weights, std::uint64_t position_count,
                               std::uint64_t seed)
    : position_count_(position_count), seed_(seed), columns_(weights.size()) {
    const std::uint64_t count = weights.size();
    // Vose's construction of the alias table: each row's integer weight is multiplied by `count`, so that
    // all of them together fill `count` columns of equal size
    std::vector<uint128> left(count);
    {
        const std::vector<std::uint64_t> numbers = whole_numbers(weights);
        for (std::uint64_t row = 0; row < count; ++row) {
            left[row] = uint128{numbers[row]} * count;
            column_size_ += numbers[row];
        }
    }
    if (column_size_ == 0) {
        if (position_count == 0) return;
        throw invalid_argument(
            fmt::format("cannot draw rows by weight: none of the {} weights is above 0", count));
    }
    // rows that do not fill a column are kept at the front, rows that do at the back
    std::vector<std::uint64_t> waiting(count);
    std::uint64_t small_end = 0;
    std::uint64_t large_begin = count;
    for (std::uint64_t row = 0; row < count; ++row) {
        waiting[left[row] < column_size_ ? small_end++ : --large_begin] = row;
    }
    while (small_end > 0) {
        // a small row has less than a column, so another row has more: there is always a large row
        const std::uint64_t small = waiting[--small_end];
        const std::uint64_t large = waiting[large_begin];
        columns_[small] = {static_cast<std::uint64_t>(left[small]), large};
        left[large] -= column_size_ - left[small];
        if (left[large] < column_size_) {
            ++large_begin;
            waiting[small_end++] = large;
        }
    }
    for (; large_begin < count; ++large_begin) {
        columns_[waiting[large_begin]] = {column_size_, waiting[large_begin]};
    }
}

void weighted_order::rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const {
    r123::Philox4x32 philox;
    const auto low = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
    const auto high = [](std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); };
    const auto joined = [](std::uint32_t a, std::uint32_t b) { return a | std::uint64_t{b} << 32; };
    const r123::Philox4x32::key_type key{{low(seed_), high(seed_)}};
    // some columns at a time, so that they are fetched from memory together
    struct draw {
        std::uint64_t index;
        std::uint64_t height;
    };
    std::array<draw, 32> draws{};
    for (; !rows.empty(); rows = rows.subspan(std::min(draws.size(), rows.size()))) {
        const auto drawn = std::span(draws).first(std::min(draws.size(), rows.size()));
        for (auto& [index, height] : drawn) {
            const auto random = philox({{low(first), high(first), low(epoch), high(epoch)}}, key);
            ++first;
            index = scale(joined(random[0], random[1]), columns_.size());
            height = scale(joined(random[2], random[3]), column_size_);
            __builtin_prefetch(&columns_[index]);
        }
        for (std::size_t i = 0; i < drawn.size(); ++i) {
            const column& of = columns_[drawn[i].index];
            rows[i] = drawn[i].height < of.own ? drawn[i].index : of.alias;
        }
    }
}

std::uint64_t weighted_order::content() const noexcept {
    return XXH3_64bits(columns_.data(), columns_.size() * sizeof(column));
}

}  // namespace pinflow::detail
