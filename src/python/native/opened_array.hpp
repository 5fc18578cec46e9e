#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

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
    /// The Python object that reads the rows, which their row_source keeps, too. Null for other arrays.
    std::shared_ptr<PyObject> kept;
    /// The Python objects that read rows of this array or of its parts, for comparison only.
    std::vector<const PyObject*> readers;

    /// The elements if they were in memory or mapped when the array was opened; otherwise null, also after
    /// `elements`.
    const array* elements_at_hand() const noexcept { return elements_ ? &*elements_ : nullptr; }

 private:
    explicit opened_array(dtype type) : type_(std::move(type)) {}

    dtype type_;
    shape_vector shape_;
    std::string reason_;
    std::string label_;
    std::string path_;  ///< of elements that are decoded later; empty if they are gathered from the rows
    std::string name_;
    file_identity identity_;  ///< of the file at `path_`
    std::shared_ptr<const row_source> rows_;
    std::string no_rows_reason_;
    std::optional<array> elements_;
    mutable std::mutex mutex_;
    mutable std::optional<array> decoded_;
};

void bind_arrays(nanobind::module_& module);

}  // namespace pinflow::python
