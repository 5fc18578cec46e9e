#pragma once

#include <cstdint>
#include <span>

namespace pinflow {

/// The order of rows within an epoch.
enum class order {
    sequential,  ///< 0, 1, 2, ...
    shuffled,    ///< every row once, in an order of its own for each seed and epoch
};

/// A permutation of 0 ... size-1 that is computed, not stored: any position costs the same and no memory is
/// used. A keyed bijection (a Feistel network of alternating halves on the smallest sufficient number of
/// bits, walked along its cycle until it lands inside; Black and Rogaway, "Ciphers with Arbitrary Finite
/// Domains", 2002). The same size and key give the same permutation everywhere and for ever: this is version
/// 1 of the order "shuffled".
class permutation {
 public:
    /// `key` may be any number; nearby keys give unrelated permutations. Sizes up to 2^62.
    permutation(std::uint64_t size, std::uint64_t key);

    std::uint64_t size() const noexcept { return size_; }
    /// The element at `position` (below `size`).
    std::uint64_t operator()(std::uint64_t position) const noexcept;

 private:
    static constexpr unsigned max_rounds = 24;

    std::uint64_t encrypt(std::uint64_t value) const noexcept;

    std::uint64_t size_;
    unsigned low_bits_ = 0;
    unsigned high_bits_ = 0;
    unsigned rounds_ = 0;
    std::uint64_t first_shift_ = 0;
    std::uint64_t last_shift_ = 0;
    std::uint64_t round_keys_[max_rounds] = {};
};

/// Which row comes at which position: a pure function of (order, row count, seed, epoch, position). Small and
/// copyable; thread-safe.
class sampler {
 public:
    sampler(pinflow::order order, std::uint64_t row_count, std::uint64_t seed) noexcept
        : order_(order), row_count_(row_count), seed_(seed) {}

    pinflow::order order() const noexcept { return order_; }
    std::uint64_t row_count() const noexcept { return row_count_; }
    std::uint64_t seed() const noexcept { return seed_; }

    /// Writes the rows at positions first, first + 1, ... of `epoch` to `rows`; first + rows.size() must not
    /// pass the row count.
    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const;

 private:
    pinflow::order order_;
    std::uint64_t row_count_;
    std::uint64_t seed_;
};

}  // namespace pinflow
