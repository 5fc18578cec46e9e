#include "loader/windowed_order.hpp"

#include <algorithm>
#include <array>

#include "loader/order_key.hpp"

namespace pinflow::detail {

namespace {

// arbitrary salts, one for each random choice of an epoch
constexpr std::uint64_t start_salt = 0xDB4F0B9175AE2165;    // the row at which the first chunk begins
constexpr std::uint64_t chunks_salt = 0x8B51F9DD36D2C8C7;   // the order of the chunks
constexpr std::uint64_t windows_salt = 0xC3A5C85C97CB3127;  // the order of the rows within windows
// the difference between the keys of two consecutive windows; odd, so that no two windows share a key
constexpr std::uint64_t window_step = 0xB492B66FBE98F273;

}  // namespace

windowed_order::windowed_order(std::uint64_t row_count, std::uint64_t seed,
                               std::uint64_t window_rows) noexcept
    : row_count_(row_count), seed_(seed) {
    if (row_count == 0) return;
    chunk_rows_ = std::max<std::uint64_t>(1, window_rows / 16);
    chunk_count_ = (row_count - 1) / chunk_rows_ + 1;
    missing_rows_ = chunk_count_ * chunk_rows_ - row_count;
    const std::uint64_t max_chunks = window_rows == row_count ? chunk_count_ : window_rows / chunk_rows_;
    const std::uint64_t window_count = (chunk_count_ - 1) / max_chunks + 1;
    chunks_per_window_ = chunk_count_ / window_count;
    larger_windows_ = chunk_count_ % window_count;
}

windowed_order::window windowed_order::window_of(std::uint64_t turn) const noexcept {
    const std::uint64_t in_larger = larger_windows_ * (chunks_per_window_ + 1);
    if (turn < in_larger) {
        const std::uint64_t number = turn / (chunks_per_window_ + 1);
        return {number, number * (chunks_per_window_ + 1), chunks_per_window_ + 1};
    }
    const std::uint64_t number = (turn - in_larger) / chunks_per_window_;
    return {larger_windows_ + number, in_larger + number * chunks_per_window_, chunks_per_window_};
}

void windowed_order::rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const {
    if (rows.empty()) return;
    const std::uint64_t key = order_key(seed_, epoch);
    const permutation chunks(chunk_count_, digest_mix(key ^ chunks_salt));
    const std::uint64_t windows_key = digest_mix(key ^ windows_salt);
    const std::uint64_t start = digest_mix(key ^ start_salt) % row_count_;
    // every chunk has chunk_rows_ rows, except the last one. Positions after its window are shifted
    const std::uint64_t short_turn = chunks.position_of(chunk_count_ - 1);
    const window short_window = window_of(short_turn);
    const std::uint64_t short_end =
        (short_window.first_turn + short_window.chunk_count) * chunk_rows_ - missing_rows_;
    std::array<std::uint64_t, max_window_chunks> chunk_begins{};
    while (!rows.empty()) {
        const std::uint64_t shift = first < short_end ? 0 : missing_rows_;
        const window within = window_of((first + shift) / chunk_rows_);
        const bool has_short = within.number == short_window.number;
        const std::uint64_t begin = within.first_turn * chunk_rows_ - shift;
        const std::uint64_t size = within.chunk_count * chunk_rows_ - (has_short ? missing_rows_ : 0);
        const auto begins = std::span(chunk_begins).first(within.chunk_count);
        chunks.elements_at(within.first_turn, begins);
        for (std::uint64_t& each : begins)
            each = start + each * chunk_rows_;
        const std::uint64_t gap_begin =
            has_short ? (short_turn - within.first_turn + 1) * chunk_rows_ - missing_rows_ : size;
        const permutation shuffled(size, windows_key + within.number * window_step);
        const auto count = std::min<std::uint64_t>(rows.size(), begin + size - first);
        shuffled.elements_at(first - begin, rows.first(count));
        for (std::uint64_t& each : rows.first(count)) {
            const std::uint64_t offset = each >= gap_begin ? each + missing_rows_ : each;
            const std::uint64_t turn = offset / chunk_rows_;
            const std::uint64_t row = chunk_begins[turn] + (offset - turn * chunk_rows_);
            each = row < row_count_ ? row : row - row_count_;
        }
        first += count;
        rows = rows.subspan(count);
    }
}

}  // namespace pinflow::detail
