#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pinflow/dtype.hpp"

namespace pinflow::detail {

/// The byte swaps that make elements of a type little-endian, computed once: for structured types, the offset
/// and size of each number. Applying it is thread-safe.
class swap_plan {
 public:
    explicit swap_plan(const dtype& type);

    /// Whether the elements are already little-endian.
    bool empty() const noexcept { return steps_.empty(); }
    /// Makes `elements`, a whole number of elements, little-endian in place.
    void apply(std::span<std::byte> elements) const noexcept;

 private:
    /// Within an element: `count` contiguous numbers, or `count` repetitions of `nested`.
    struct step {
        std::uint64_t offset_bytes = 0;
        std::uint64_t size_bytes = 0;  ///< of a number, or of a repetition
        std::uint64_t count = 1;
        std::vector<step> nested;  ///< empty for numbers
    };

    static void append_steps(std::vector<step>& steps, const dtype& type, std::uint64_t offset_bytes,
                             std::uint64_t count);
    static void apply_steps(std::span<const step> steps, std::byte* first, std::uint64_t repetitions,
                            std::uint64_t stride_bytes) noexcept;

    std::vector<step> steps_;
    std::uint64_t item_size_bytes_;
};

}  // namespace pinflow::detail
