#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "src/core/scalar.hpp"
#include "src/device/flat_work.hpp"
#include "src/device/update_rules.hpp"

/// Arguments of the device operations on records of embedding tables. nvcc compiles this file, too.
namespace pinflow::detail {

/// What a record consists of: a row of weights at its front, each state of the rule as a float for each
/// weight (for the whole row, if the rule is row-wise), and the number of steps of the row, 32 bits. Each
/// part begins at a multiple of 16 bytes.
struct record_layout {
    std::uint64_t columns = 0;
    flat_type type = flat_type::float32;  ///< of weights: not float64
    std::uint64_t states_bytes[max_rule_states] = {};
    std::uint64_t steps_bytes = 0;
    std::uint64_t size_bytes = 0;  ///< of a record, with padding: a multiple of 16
};

/// Records of different rows, contiguous, and the indices of the rows in ascending order. In device memory.
struct record_rows {
    std::byte* records = nullptr;
    const std::uint64_t* ids = nullptr;
    const std::uint64_t* count = nullptr;
    std::uint64_t max_count = 0;  ///< an upper bound of *count, known to the host
};

/// Replaces those records whose rows are also among `newer`.
struct record_patch {
    record_rows rows;
    record_rows newer;
    std::uint64_t record_bytes = 0;
};

/// From this number of gradients on, an id is frequent: a GPU sums its gradients before the update. With
/// Zipf's distribution, the most frequent of 10 million ids comes 8,000 times among 131,072.
inline constexpr std::uint32_t frequent_gradients = 128;

/// One step of the rule for each row.
struct record_update {
    record_rows rows;
    record_layout layout;
    rule_kind rule = rule_kind::adam;
    const rule_numbers* numbers = nullptr;  ///< in device memory
    /// The gradients of row i are those at positions[starts[i]] ... positions[starts[i + 1] - 1], in
    /// ascending order. They are added one after the other, as floats.
    const std::uint32_t* starts = nullptr;
    const std::uint32_t* positions = nullptr;
    std::uint64_t position_count = 0;
    const std::byte* gradients = nullptr;  ///< rows of `columns` numbers, contiguous, aligned to a number
    flat_type gradient_type = flat_type::float32;  ///< not float64
    /// Scratch memory: a row of `columns` numbers for each frequent_gradients of the positions, rounded down.
    /// The sum of a frequent id whose gradients begin at `start` is in row start / frequent_gradients.
    float* sums = nullptr;
};

/// What the update of one record needs to know: the same for each weight.
template <typename Rule>
struct record_step {
    typename Rule::template step<float> rule;
    decay_step<float> decay;
};

template <typename Rule>
inline constexpr bool is_rowwise = std::is_same_v<Rule, rowwise_adagrad_rule>;

// The order in which the squares of a row's gradients are added, on every device. Column c belongs to sum (c
// / 4) % 32, which takes its columns in ascending order. The sums are added in pairs at a distance of 16, of
// 8, and so on.
inline constexpr unsigned square_sums = 32;
inline constexpr unsigned columns_of_turn = 4;

}  // namespace pinflow::detail
