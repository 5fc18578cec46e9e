#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pinflow/array.hpp"

namespace pinflow::detail {

/// Scratch memory that is reused, and grows to the largest size requested. Growing discards the contents. A
/// strided_reader takes at most `strided_reader::scratch_bytes` and 32 KiB of padding; decoding and encoding
/// HDF5 chunks takes whole chunks. For one thread at a time.
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

/// Delivers the elements of an array with any strides (a field of a structure, Fortran order) in C order, in
/// their stored byte order. Files are read with pread; elements with small gaps between them are read
/// together. Keeps the array alive. Thread-safe.
class strided_reader {
 public:
    /// The maximum number of bytes that are read before they are reordered. They stay in a core's cache.
    static constexpr std::uint64_t scratch_bytes = 512 << 10;

    explicit strided_reader(array source);
    /// Of a part of the array: the indices `first[axis]` ... `first[axis] + lengths[axis] - 1` of each axis.
    strided_reader(array source, const shape_vector& first, const shape_vector& lengths);

    /// Whether the elements are stored in C order, with or without gaps.
    bool in_order() const noexcept;
    /// The size of a unit: elements that are contiguous in the source. As delivered, in C order, units begin
    /// at multiples of this size.
    std::uint64_t unit_bytes() const noexcept { return unit_bytes_; }
    /// Where a read that begins at `begin_bytes` should end, if the elements are not in order. Such a read
    /// takes whole slices along one axis, `max_bytes` at most, or one unit if no slice fits.
    std::uint64_t block_end(std::uint64_t begin_bytes, std::uint64_t max_bytes) const noexcept;

    /// Fills `destination` with the bytes from `begin_bytes` on, counted in C order.
    /// @return the time spent waiting for storage.
    /// @throws what input_file::read throws.
    std::chrono::nanoseconds read(std::uint64_t begin_bytes, std::span<std::byte> destination,
                                  scratch_memory& scratch) const;

 private:
    struct axis {
        std::uint64_t count;
        std::uint64_t stride_bytes;  ///< in the source
        std::uint64_t item_bytes;    ///< delivered bytes of one index
    };

    array array_;
    const std::byte* data_;          // of an array in memory
    std::uint64_t first_bytes_ = 0;  // from the array's first element to that of the part
    std::uint64_t unit_bytes_;       // of a unit: one element, or as many elements as are contiguous
    std::vector<axis> axes_;  // over units, from the outermost to the innermost, without axes of length 1

    friend class strided_read;
};

}  // namespace pinflow::detail
