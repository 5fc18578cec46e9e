#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "pinflow/array.hpp"

namespace pinflow::detail {

/// Reads the elements of one array once, in C order and little-endian. Its memory does not grow with the
/// array, except for a deflated .npz member in Fortran order. `pinflow convert`, the loads of flat
/// parameters and embedding tables, and embedding_table::import_weights read from it. So do `publish_file`,
/// for deflated .npz members and for arrays without axes or in Fortran order, and loads of tensors that must
/// be decoded. Not thread-safe.
class element_stream {
 public:
    element_stream() = default;
    element_stream(const element_stream&) = delete;
    element_stream& operator=(const element_stream&) = delete;
    virtual ~element_stream() = default;

    /// The type of the delivered elements; always little-endian.
    virtual const pinflow::dtype& dtype() const noexcept = 0;
    virtual const shape_vector& shape() const noexcept = 0;
    /// Fills `destination`, a whole number of elements, with the next elements.
    /// @throws invalid_argument past the end.
    /// @throws data_changed, system_failure or format_error if reading fails.
    virtual void read(std::span<std::byte> destination) = 0;
    /// Skips the next `size_bytes`, a whole number of elements that are left.
    /// @return false if the stream can only skip by reading; then it has done nothing.
    virtual bool skip(std::uint64_t /*size_bytes*/) { return false; }
    /// Restricts the stream to the indices `begin` ... `end` - 1 of an axis, which must be within the shape:
    /// it then delivers only their elements, in C order. shape() is still that of the whole array. Each call
    /// restarts at the first selected element, and keeps the selections of other axes. It may be called after
    /// `read` and `skip`.
    /// @return false, and the stream is unchanged, if it cannot leave out elements along this axis. A stream
    /// that can restrict an axis other than the first can restrict all.
    virtual bool select(std::size_t /*axis*/, std::uint64_t /*begin*/, std::uint64_t /*end*/) {
        return false;
    }
    /// Makes the checks that need the whole array. Call it after the last element was read or left out.
    /// @throws format_error for a wrong checksum, data_changed for a file that changed meanwhile.
    virtual void finish() = 0;
};

/// Makes a stream of any array: in C or Fortran order, strided, big-endian, without axes. Files are read with
/// pread. `memory_bytes` limits the memory for reordering. It counts as 576 KiB if it is less, and up to 32
/// KiB of padding are added.
std::unique_ptr<element_stream> stream_elements(const array& array, std::uint64_t memory_bytes);

}  // namespace pinflow::detail
