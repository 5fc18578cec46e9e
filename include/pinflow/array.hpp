#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/dtype.hpp"
#include "pinflow/empty_on_move.hpp"
#include "pinflow/error.hpp"
#include "pinflow/memory.hpp"

namespace pinflow {

class input_file;
class mapped_file;
class row_source;

/// Lengths of the axes, in elements.
using shape_vector = std::vector<std::uint64_t>;

/// The number of elements of a shape: the product of its lengths, 1 for no axes.
/// @throws invalid_argument if the product is 2^64 or more; a length of 0 counts as 1 in this check.
std::uint64_t element_count(std::span<const std::uint64_t> shape);
/// Bytes between neighbours along each axis of a C-order array; a length of 0 counts as 1.
/// @throws invalid_argument when the array would take 2^63 bytes or more.
std::vector<std::int64_t> c_strides_bytes(std::span<const std::uint64_t> shape,
                                          std::uint64_t item_size_bytes);
/// The same for Fortran order, where the first axis varies fastest.
std::vector<std::int64_t> fortran_strides_bytes(std::span<const std::uint64_t> shape,
                                                std::uint64_t item_size_bytes);
/// "(3, 4)", "(3,)", "()": numpy's spelling.
std::string to_string(std::span<const std::uint64_t> shape);

/// Borrowed elements: address, type, shape and strides. It does not own the memory, and does not know the
/// device of the address; the function that returns the view documents the device. A moved-from view has no
/// elements.
class array_view {
 public:
    /// A C-order view.
    array_view(const std::byte* data, pinflow::dtype type, shape_vector shape);
    /// A view in any order. Strides are bytes between neighbours along each axis, one stride per axis.
    /// @throws invalid_argument if there is not exactly one stride per axis, or if the elements take 2^63
    /// bytes or more.
    array_view(const std::byte* data, pinflow::dtype type, shape_vector shape,
               std::vector<std::int64_t> strides_bytes);

    /// May be null if there are no bytes.
    const std::byte* data() const noexcept { return data_; }
    const pinflow::dtype& dtype() const noexcept { return dtype_; }
    const shape_vector& shape() const noexcept { return shape_; }
    const std::vector<std::int64_t>& strides_bytes() const noexcept { return strides_bytes_; }
    /// The number of elements.
    std::uint64_t size() const noexcept { return size_; }
    /// Bytes of all elements, without gaps.
    std::uint64_t size_bytes() const noexcept { return size_ * dtype_.size_bytes(); }
    /// Whether the view was moved from. It has no elements then, whatever `shape` says.
    bool is_moved_from() const noexcept { return size_ == 0 && shape_.empty(); }
    /// Whether the elements are in C order without gaps; always true for fewer than two elements.
    bool c_contiguous() const;
    /// Whether the elements are in Fortran order without gaps.
    bool fortran_contiguous() const;

    /// The elements as T, in C order.
    /// @throws invalid_argument if T is not the element type, or if the elements are big-endian, not in C
    /// order, or not aligned for T.
    template <typename T>
    const T* as() const {
        check_readable_as(pinflow::dtype::of<T>(), alignof(T));
        return reinterpret_cast<const T*>(data());
    }

 private:
    void check_readable_as(const pinflow::dtype& type, std::size_t alignment) const;

    detail::empty_on_move<const std::byte*> data_;
    pinflow::dtype dtype_;
    shape_vector shape_;
    std::vector<std::int64_t> strides_bytes_;
    detail::empty_on_move<std::uint64_t> size_;
};

/// An array that keeps its bytes alive: a mapping of a file, or memory. Copies share the bytes, and no array
/// writes to them. Immutable, so thread-safe. A moved-from array has no elements: `view` and `rows` throw
/// invalid_argument.
class array {
 public:
    /// Takes over host memory that holds the elements in C order.
    /// @throws invalid_argument if the region is smaller than the shape needs.
    array(memory_region memory, pinflow::dtype type, shape_vector shape);

    /// The same for elements in C or Fortran order. `reason` becomes array::reason.
    static array of_memory(memory_region memory, pinflow::dtype type, shape_vector shape, bool fortran_order,
                           std::string reason);

    /// Opens the elements of an open file from `offset_bytes` on, in C or Fortran order. They are mapped if
    /// the system allows it, and, for 8 MiB or more under `ulimit -v`, if 128 MiB of address space stay free.
    /// Otherwise they can only be read as rows (see `reason`).
    /// @throws invalid_argument for a null pointer; format_error if the file ends before the last element.
    static array of_file(std::shared_ptr<const input_file> file, std::uint64_t offset_bytes,
                         pinflow::dtype type, shape_vector shape, bool fortran_order = false);
    /// The same without a mapping, so that only the rows can be read. For one of many files that
    /// `concatenate` or `stack` then maps together.
    static array of_file_unmapped(std::shared_ptr<const input_file> file, std::uint64_t offset_bytes,
                                  pinflow::dtype type, shape_vector shape, bool fortran_order = false);

    const pinflow::dtype& dtype() const noexcept { return view_.dtype(); }
    const shape_vector& shape() const noexcept { return view_.shape(); }
    std::uint64_t size_bytes() const noexcept { return view_.size_bytes(); }
    /// Whether `view` can be used: the elements are mapped from a file, or in the process's own memory.
    bool has_view() const noexcept { return has_view_; }
    /// Whether the elements are mapped from a file.
    bool is_mapped() const noexcept { return has_view_ && file_ != nullptr; }
    /// One sentence: why the array is mapped, or where its elements are instead. If `view` cannot be used,
    /// why not.
    const std::string& reason() const noexcept { return reason_; }
    /// What messages and reports call the array: "a.npz:images", or the path if the file has one array
    /// without a name. Empty for an array in memory, unless `labelled` has set it.
    std::string label() const;
    /// The same array with another label.
    array labelled(std::string label) const;
    /// The elements in place; their memory is valid while this array or a copy of it lives. If the file is
    /// truncated, reading the lost pages raises SIGBUS: use `rows` if that can happen.
    /// @throws unsupported unless has_view().
    const array_view& view() const;
    /// The file of the array; null for an array in memory.
    const std::shared_ptr<const input_file>& file() const noexcept { return file_; }
    /// The offset of the first element in the file.
    std::uint64_t offset_bytes() const noexcept { return offset_bytes_; }
    /// Bytes between neighbours along each axis, in the file and in memory; also valid if nothing is mapped.
    const std::vector<std::int64_t>& strides_bytes() const noexcept { return view_.strides_bytes(); }

    /// Reinterprets the same bytes as another type of the same size: `|V2` as bfloat16, `<M8[ns]` as int64.
    /// Nothing is copied.
    /// @throws invalid_argument if the sizes differ.
    array view_as(const pinflow::dtype& type) const;
    /// One field of a structured array, as a strided view of the same bytes; the axes of a field that is an
    /// array come last. `name` may be a path into nested fields: "position.x".
    /// @throws invalid_argument if there is no such field; the message names up to 20 existing fields.
    array field(std::string_view name) const;
    /// Sliding windows along the first axis: window i has the rows i * step ... i * step + length - 1. The
    /// shape is (windows, length, the other axes); rows after the last whole window are left out. Windows
    /// overlap if `step` is less than `length`, as sequences of tokens that are cut from one long array do.
    /// A view of the same bytes: nothing is copied.
    /// @throws invalid_argument if `length` or `step` is 0, if the array has no axes, or if the windows, with
    /// all elements that repeat, take 2^63 bytes or more.
    array sliding_windows(std::uint64_t length, std::uint64_t step = 1) const;

    /// An array over host memory whose rows start `stride_bytes` apart. Each row is contiguous, in C order.
    /// @throws invalid_argument for an array without axes, if the region is smaller than the rows need, or if
    /// the stride is 0, or 2^63 or more.
    static array of_strided_memory(memory_region memory, pinflow::dtype type, shape_vector shape,
                                   std::uint64_t stride_bytes);

    /// The array as a source of rows along its first axis, for a loader. Big-endian elements are delivered
    /// little-endian. Rows with gaps inside them are delivered without the gaps: for example, a field of a
    /// structured array with several axes, or sliding windows of a field. Such rows are not stored as they
    /// are delivered, so the source has no extents. The source keeps the bytes alive.
    /// @throws unsupported for an array without axes, or in Fortran order with several axes longer than 1.
    std::shared_ptr<const row_source> rows() const;
    operator std::shared_ptr<const row_source>() const { return rows(); }

 private:
    array(array_view view, std::shared_ptr<const void> owner);
    static array of_mapping(std::shared_ptr<const input_file> file, std::uint64_t offset_bytes,
                            pinflow::dtype type, shape_vector shape, bool fortran_order,
                            std::shared_ptr<const mapped_file> mapping, std::string reason);

    array_view view_;
    std::shared_ptr<const void> owner_;
    std::shared_ptr<const input_file> file_;
    detail::empty_on_move<std::uint64_t> offset_bytes_ = 0;
    detail::empty_on_move<bool> has_view_ = true;
    std::string reason_;
    std::string label_;  // empty: the path of the file
};

}  // namespace pinflow
