#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pinflow {

/// The order of rows within an epoch. The functions of `sampler` with these names describe each order.
enum class order {
    sequential,
    shuffled,
    windowed,
    listed,
    weighted,
    custom,
};

/// "sequential", "shuffled", "windowed", "listed", "weighted", "custom".
std::string_view to_string(order order) noexcept;

/// A permutation of 0 ... size-1: any position can be computed directly, in expected constant time and
/// without memory. It is a keyed bijection: a Feistel network of alternating halves on the smallest
/// sufficient number of bits, applied again until the result is below `size` (cycle walking; Black and
/// Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The same size and key always give the same
/// permutation, on every machine: this is version 1 of the order "shuffled".
class permutation {
 public:
    static constexpr std::uint64_t max_size = std::uint64_t{1} << 62;

    /// `key` may be any number; nearby keys give unrelated permutations.
    /// @throws invalid_argument for a size past max_size.
    permutation(std::uint64_t size, std::uint64_t key);

    std::uint64_t size() const noexcept { return size_; }
    /// The element at `position` (below `size`).
    std::uint64_t operator()(std::uint64_t position) const noexcept;
    /// Writes the elements at `first`, first + 1, ... to `elements`. `first + elements.size()` must be at
    /// most size(). Takes about half the time of calls for single positions.
    void elements_at(std::uint64_t first, std::span<std::uint64_t> elements) const noexcept;
    /// The position of `element` (below `size`): the inverse, at the same expected cost.
    std::uint64_t position_of(std::uint64_t element) const noexcept;

 private:
    static constexpr unsigned max_rounds = 24;

    std::uint64_t encrypt(std::uint64_t value) const noexcept;
    std::uint64_t decrypt(std::uint64_t value) const noexcept;

    std::uint64_t size_;
    unsigned low_bits_ = 0;
    unsigned high_bits_ = 0;
    unsigned rounds_ = 0;
    std::uint64_t first_shift_ = 0;
    std::uint64_t last_shift_ = 0;
    std::uint64_t round_keys_[max_rounds] = {};
};

/// A user-defined order: the row at each position of an epoch. `rows_at` must depend on nothing but the
/// epoch and the position. A loader calls it ahead of the consumer, from several threads at once, for
/// ranges of any size, and again for the same positions after a resume.
class row_sequence {
 public:
    row_sequence() = default;
    row_sequence(const row_sequence&) = delete;
    row_sequence& operator=(const row_sequence&) = delete;
    virtual ~row_sequence() = default;

    /// The name and version of the order, such as "curriculum/1": letters, digits, '-', '_' and '.', a slash,
    /// and a version number. Change the number whenever the order gives other rows: a saved state resumes
    /// only with an order of the same name.
    virtual std::string name() const = 0;
    /// The number of positions in an epoch; the same for every epoch.
    virtual std::uint64_t position_count() const = 0;
    /// Writes the rows at positions first, first + 1, ... of `epoch` to `rows`. An exception ends the loader.
    virtual void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const = 0;
};

/// All that an order depends on, apart from the number of rows: two samplers of equal identity and row count
/// give the same rows at the same positions. A saved state holds one.
struct order_identity {
    std::string name;  ///< the order and its version: "shuffled/1", or row_sequence::name()
    std::uint64_t seed = 0;
    std::uint64_t window_rows = 0;
    std::uint64_t position_count = 0;  ///< positions in an epoch
    std::uint64_t content = 0;         ///< XXH3 of the list or of the table of weights; 0 for other orders

    bool operator==(const order_identity&) const = default;
};

/// For messages: "windowed/1, seed 3, windows of 4096 rows, 50000 positions".
std::string to_string(const order_identity& identity);

/// The default window of a loader: 64 MiB of rows, at least one row.
std::uint64_t default_window_rows(std::uint64_t row_size_bytes) noexcept;

/// Gives the row at each position: a pure function of the order and its parameters, the seed, the epoch and
/// the position. The function of a version of an order never changes. Cheap to copy; thread-safe.
class sampler {
 public:
    /// 0, 1, 2, ... in every epoch.
    static sampler sequential(std::uint64_t row_count);

    /// Every row once, in the order of a `permutation`, which differs for each seed and epoch. Takes no
    /// memory.
    /// @throws invalid_argument for more than 2^62 rows.
    static sampler shuffled(std::uint64_t row_count, std::uint64_t seed);

    /// Every row once, from a small part of the data at a time: chunks of consecutive rows in shuffled order,
    /// and the rows of some 16 chunks (a window) shuffled among each other before those of the next window.
    /// For data that storage or the page cache reads faster in large pieces. Takes no memory. Any position
    /// can be computed directly.
    ///
    /// A chunk has window_rows / 16 rows, at least one. In each epoch the first chunk begins at a random row,
    /// and chunks wrap around the end of the data; the last one may be shorter. A window has at most
    /// window_rows / (rows of a chunk) chunks. There are as few windows as that allows, and their chunk
    /// counts differ by at most one.
    ///
    /// What is mixed: every row is equally likely at every position. A chunk may come anywhere in the epoch,
    /// and shares its window with other chunks in each epoch. A row may come anywhere in its window.
    ///
    /// What is not mixed: the rows of one chunk come within one window, less than `window_rows` positions
    /// apart. A batch within one window has rows of that window's chunks only, usually 16. A batch that
    /// crosses windows has rows of each of them. So if the data is sorted (by label, by time), a small batch
    /// covers only a few parts of it.
    ///
    /// A window of all rows or more is a plain shuffle. So is a window of less than 32 rows, since its chunks
    /// are single rows.
    /// @throws invalid_argument for a window of 0 rows, and for more than 2^62 rows.
    static sampler windowed(std::uint64_t row_count, std::uint64_t seed, std::uint64_t window_rows);

    /// The rows of a list, in its order, in every epoch. Rows may repeat or be left out. Copies of the
    /// sampler share the list.
    /// @throws invalid_argument for a row that is not below `row_count`.
    static sampler listed(std::uint64_t row_count, std::vector<std::uint64_t> rows);

    /// Rows drawn with replacement, one for each of `position_count` positions: row i with probability
    /// weights[i] / (sum of the weights), independently of other positions, epochs and seeds. There are as
    /// many rows as weights. Weights are rounded down to multiples of a unit of at most 2^-61 of their sum,
    /// so a smaller weight may count as 0. A row of weight 0 is never drawn. Takes 16 bytes per row, which
    /// copies of the sampler share, and 24 more during construction.
    ///
    /// Walker's alias method ("An efficient method for generating discrete random variables with general
    /// distributions", 1977). The table is built as by Vose ("A linear algorithm for generating random
    /// numbers with a given distribution", 1991) but in integers; the random numbers are Philox4x32-10 of
    /// (seed, epoch, position) (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
    /// @throws invalid_argument for a weight that is negative or not finite, and if none is above 0 although
    /// `position_count` is.
    static sampler weighted(std::span<const double> weights, std::uint64_t position_count,
                            std::uint64_t seed);

    /// A user-defined order of data with `row_count` rows. Copies of the sampler share `rows`.
    /// @throws invalid_argument for a null pointer, and for a name that does not follow row_sequence::name or
    /// that pinflow uses itself.
    static sampler custom(std::uint64_t row_count, std::shared_ptr<const row_sequence> rows);

    pinflow::order order() const noexcept { return order_; }
    /// The number of rows in the data; rows_at gives only lower numbers.
    std::uint64_t row_count() const noexcept { return row_count_; }
    /// The number of positions in an epoch; row_count() for sequential, shuffled and windowed.
    std::uint64_t position_count() const noexcept { return identity_.position_count; }
    /// The same for equal orders of equal parameters.
    const order_identity& identity() const noexcept { return identity_; }

    /// Writes the rows at positions first, first + 1, ... of `epoch` to `rows`.
    /// @throws invalid_argument if positions are out of range, or if a custom order gives a row that is not
    /// below row_count(); what a custom order throws.
    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const;

 private:
    sampler(pinflow::order order, std::uint64_t row_count, order_identity identity,
            std::shared_ptr<const row_sequence> sequence) noexcept;

    pinflow::order order_;
    std::uint64_t row_count_;
    order_identity identity_;
    std::shared_ptr<const row_sequence> sequence_;
};

}  // namespace pinflow
