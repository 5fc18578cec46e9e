#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pinflow/array.hpp"

namespace pinflow::detail {

/// Memory for what is read before it is put in order; grows to what is needed, at most
/// `strided_reader::scratch_bytes` and a few cache lines. For one thread at a time.
class scratch_memory {
 public:
    std::byte* reserve(std::uint64_t size_bytes) {
        if (size_bytes > size_bytes_) {
            data_ = std::make_unique_for_overwrite<std::byte[]>(size_bytes);
            size_bytes_ = size_bytes;
        }
        return data_.get();
    }

 private:
    std::unique_ptr<std::byte[]> data_;
    std::uint64_t size_bytes_ = 0;
};

/// Reads the elements of an array in C order, byte order untouched, whatever order they lie in: fields with
/// others between them, Fortran order. Files are read with pread, neighbours together where only little lies
/// between them. Keeps the array alive. Thread-safe.
class strided_reader {
 public:
    /// What is read at once before it is put in order; small enough to stay in a core's cache.
    static constexpr std::uint64_t scratch_bytes = 512 << 10;

    explicit strided_reader(array source);

    /// Whether C order is the order that the elements lie in, with gaps or without.
    bool in_order() const noexcept;
    /// Bytes that are contiguous in C order wherever they begin at a multiple of this number.
    std::uint64_t unit_bytes() const noexcept { return unit_bytes_; }
    /// The end of a range that begins at `begin_bytes`, takes at most `max_bytes` (or one unit) and is good
    /// to read at once when the elements are not in order: of whole slices, as far as they fit.
    std::uint64_t block_end(std::uint64_t begin_bytes, std::uint64_t max_bytes) const noexcept;

    /// Fills `destination` with the bytes from `begin_bytes` on, counted in C order.
    /// @return the time spent waiting for storage. @throws what input_file::read throws.
    std::chrono::nanoseconds read(std::uint64_t begin_bytes, std::span<std::byte> destination,
                                  scratch_memory& scratch) const;

 private:
    struct axis {
        std::uint64_t count;
        std::uint64_t stride_bytes;  ///< in the source
        std::uint64_t item_bytes;    ///< of all that one index stands for, as delivered
    };

    array array_;
    const std::byte* data_;     // of an array in memory
    std::uint64_t unit_bytes_;  // delivered as they lie: elements, or as many of them as are contiguous
    std::vector<axis> axes_;    // over units, from the outermost to the innermost; none of one index

    friend class strided_read;
};

}  // namespace pinflow::detail
