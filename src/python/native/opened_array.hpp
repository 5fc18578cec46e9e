#pragma once

#include <nanobind/nanobind.h>

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::python {

/// What `pinflow.open` gives: rows, elements, or both. Elements that are not mapped are decoded when they are
/// first asked for. Thread-safe.
class opened_array {
 public:
    /// Opens FILE[:NAME], or the rows of all files that match a pattern.
    static std::shared_ptr<opened_array> open(const std::string& text, bool stack);
    static std::shared_ptr<opened_array> of_name(const std::string& path, const std::string& name);
    static std::shared_ptr<opened_array> of_rows(std::shared_ptr<const row_source> rows);
    static std::shared_ptr<opened_array> of_array(array elements);

    const dtype& type() const noexcept { return type_; }
    const shape_vector& shape() const noexcept { return shape_; }
    std::uint64_t size_bytes() const { return element_count(shape_) * type_.size_bytes(); }
    /// Whether the elements are mapped from a file.
    bool is_mapped() const noexcept { return elements_ && elements_->is_mapped(); }
    const std::string& reason() const noexcept { return reason_; }
    const std::string& label() const noexcept { return label_; }

    /// The rows. Those of a compressed .npz member are decoded first.
    /// @throws unsupported if the array has no rows.
    std::shared_ptr<const row_source> rows() const;
    /// The array as the one row of a source. It may have no axes.
    std::shared_ptr<const row_source> as_one_row() const;
    /// The elements, which may have to be decoded or gathered first.
    const array& elements() const;
    /// As array::sliding_windows.
    /// @throws unsupported if the array is not of one file and not in memory.
    std::shared_ptr<opened_array> sliding_windows(std::uint64_t length, std::uint64_t step) const;
    /// Whether read_box may work: it is an HDF5 dataset that is not mapped. Other files can be decoded only
    /// as a whole, or have rows that are read as they are.
    bool has_boxes() const noexcept { return has_boxes_; }
    /// Reads the elements of a box, `lengths` from `first` on along each axis, little-endian and in C order.
    /// @param destination exactly their size
    /// @return false if they must be selected from rows or from all elements instead.
    bool read_box(const shape_vector& first, const shape_vector& lengths,
                  std::span<std::byte> destination) const;
    /// The Python object that reads the rows, which their row_source keeps, too. Null for other arrays.
    std::shared_ptr<PyObject> kept;
    /// The Python objects that read rows of this array or of its parts, for comparison only.
    std::vector<const PyObject*> readers;

    /// The elements if they were in memory or mapped when the array was opened; otherwise null, also after
    /// `elements`.
    const array* elements_at_hand() const noexcept { return elements_ ? &*elements_ : nullptr; }

 private:
    explicit opened_array(dtype type) : type_(std::move(type)) {}
    /// @throws data_changed if the file or the array is no longer the one that was opened.
    void check_same(const dtype& type, const shape_vector& shape) const;
    std::unique_ptr<detail::element_stream> stream_of_part() const;

    dtype type_;
    shape_vector shape_;
    std::string reason_;
    std::string label_;
    std::string path_;  ///< of elements that are decoded later; empty if they are gathered from the rows
    std::filesystem::path absolute_path_;  ///< valid after the working directory has changed
    bool has_boxes_ = false;
    std::string name_;
    std::string listed_name_;  ///< as list_arrays has it
    file_identity identity_;   ///< of the file
    std::shared_ptr<const row_source> rows_;
    std::string no_rows_reason_;
    std::optional<array> elements_;
    mutable std::mutex mutex_;
    mutable std::optional<array> decoded_;
    mutable std::mutex stored_mutex_;
    mutable std::unique_ptr<detail::element_file> stored_;  ///< the file, for read_box
};

void bind_arrays(nanobind::module_& module);

}  // namespace pinflow::python
