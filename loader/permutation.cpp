#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "pinflow/error.hpp"
#include "pinflow/loader/sampler.hpp"
#include "src/device/digest_mix.hpp"

namespace pinflow {

namespace {

/// Expands the key to a stream of numbers with splitmix64.
class key_schedule {
 public:
    explicit key_schedule(std::uint64_t key) noexcept : state_(detail::digest_mix(key)) {}
    std::uint64_t next() noexcept { return detail::digest_mix(state_ += detail::digest_gamma); }

 private:
    std::uint64_t state_;
};

/// The contribution of one half of the network to the other.
constexpr std::uint64_t round_function(std::uint64_t half, std::uint64_t key) noexcept {
    std::uint64_t z = (half + key) * 0xD1342543DE82EF95;
    z = (z ^ (z >> 32)) * 0xAF251AF3B0F025B5;
    return z >> 31;
}

/// (a + b) modulo size, for a and b below size.
constexpr std::uint64_t add_modulo(std::uint64_t a, std::uint64_t b, std::uint64_t size) noexcept {
    return a >= size - b ? a - (size - b) : a + b;
}

/// (a - b) modulo size, for a and b below size.
constexpr std::uint64_t subtract_modulo(std::uint64_t a, std::uint64_t b, std::uint64_t size) noexcept {
    return a >= b ? a - b : a + (size - b);
}

}  // namespace

permutation::permutation(std::uint64_t size, std::uint64_t key) : size_(size) {
    if (size > max_size) {
        throw invalid_argument(fmt::format("cannot shuffle {} rows: the maximum is 2^62", size));
    }
    if (size < 2) return;
    const auto bits = static_cast<unsigned>(std::bit_width(size - 1));
    low_bits_ = bits / 2;
    high_bits_ = bits - low_bits_;
    // with few bits, a round mixes little and costs little
    rounds_ = bits <= 8 ? 24 : bits <= 16 ? 12 : 8;
    key_schedule keys(key);
    // if both halves have 2 bits or more, each round is an even permutation of 2^n elements, so the network
    // makes even permutations only. The two rotations add odd ones, and make every element equally likely at
    // every position
    first_shift_ = keys.next() % size;
    last_shift_ = keys.next() % size;
    for (unsigned round = 0; round < rounds_; ++round) {
        round_keys_[round] = keys.next();
    }
}

std::uint64_t permutation::encrypt(std::uint64_t value) const noexcept {
    const std::uint64_t low_mask = (std::uint64_t{1} << low_bits_) - 1;
    const std::uint64_t high_mask = (std::uint64_t{1} << high_bits_) - 1;
    std::uint64_t low = value & low_mask;
    std::uint64_t high = value >> low_bits_;
    for (unsigned round = 0; round < rounds_; round += 2) {
        high ^= round_function(low, round_keys_[round]) & high_mask;
        low ^= round_function(high, round_keys_[round + 1]) & low_mask;
    }
    return (high << low_bits_) | low;
}

std::uint64_t permutation::decrypt(std::uint64_t value) const noexcept {
    const std::uint64_t low_mask = (std::uint64_t{1} << low_bits_) - 1;
    const std::uint64_t high_mask = (std::uint64_t{1} << high_bits_) - 1;
    std::uint64_t low = value & low_mask;
    std::uint64_t high = value >> low_bits_;
    for (unsigned round = rounds_; round > 0; round -= 2) {
        low ^= round_function(high, round_keys_[round - 1]) & low_mask;
        high ^= round_function(low, round_keys_[round - 2]) & high_mask;
    }
    return (high << low_bits_) | low;
}

std::uint64_t permutation::operator()(std::uint64_t position) const noexcept {
    if (size_ < 2) return 0;
    std::uint64_t value = add_modulo(position, first_shift_, size_);
    do {
        value = encrypt(value);
    } while (value >= size_);
    return add_modulo(value, last_shift_, size_);
}

void permutation::elements_at(std::uint64_t first, std::span<std::uint64_t> elements) const noexcept {
    if (size_ < 2) {
        std::ranges::fill(elements, 0);
        return;
    }
    // Each round depends on the one before, so several values are computed at once. Those that are not below
    // the size go on, and the next positions join them, without branches that the processor predicts wrongly.
    constexpr std::size_t width = 8;
    const std::uint64_t low_mask = (std::uint64_t{1} << low_bits_) - 1;
    const std::uint64_t high_mask = (std::uint64_t{1} << high_bits_) - 1;
    std::uint64_t low[width] = {}, high[width] = {}, values[width] = {};
    std::size_t outputs[width] = {};  // in `elements`
    std::uint64_t position = add_modulo(first, first_shift_, size_);
    std::size_t used = 0;
    for (std::size_t next = 0; used != 0 || next != elements.size();) {
        for (; used < width && next != elements.size(); ++used) {
            values[used] = position;
            outputs[used] = next++;
            position = position + 1 == size_ ? 0 : position + 1;
        }
        for (std::size_t i = 0; i < width; ++i) {
            low[i] = values[i] & low_mask;
            high[i] = values[i] >> low_bits_;
        }
        for (unsigned round = 0; round < rounds_; round += 2) {
            for (std::size_t i = 0; i < width; ++i)
                high[i] ^= round_function(low[i], round_keys_[round]) & high_mask;
            for (std::size_t i = 0; i < width; ++i)
                low[i] ^= round_function(high[i], round_keys_[round + 1]) & low_mask;
        }
        std::size_t kept = 0;
        for (std::size_t i = 0; i < used; ++i) {
            const std::uint64_t value = (high[i] << low_bits_) | low[i];
            const std::size_t output = outputs[i];
            elements[output] = add_modulo(value, last_shift_, size_);  // overwritten later if it is kept
            values[kept] = value;
            outputs[kept] = output;
            kept += value >= size_ ? 1 : 0;
        }
        used = kept;
    }
}

std::uint64_t permutation::position_of(std::uint64_t element) const noexcept {
    if (size_ < 2) return 0;
    std::uint64_t value = subtract_modulo(element, last_shift_, size_);
    do {
        value = decrypt(value);
    } while (value >= size_);
    return subtract_modulo(value, first_shift_, size_);
}

}  // namespace pinflow
