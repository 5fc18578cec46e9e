#include "src/python/native/python_rows.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <utility>

#include "pinflow/error.hpp"
#include "src/python/native/buffer.hpp"
#include "src/python/native/errors.hpp"
#include "src/python/native/python_owner.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

nb::object memory_view(void* data, std::size_t size_bytes, int flags) {
    PyObject* const view =
        PyMemoryView_FromMemory(static_cast<char*>(data), static_cast<Py_ssize_t>(size_bytes), flags);
    if (view == nullptr) throw nb::python_error();
    return nb::steal(view);
}

class python_rows final : public row_source {
 public:
    python_rows(std::shared_ptr<PyObject> source, pinflow::dtype type, const shape_vector& shape)
        : source_(std::move(source)),
          type_(std::move(type)),
          row_count_(shape.front()),
          row_shape_(shape.begin() + 1, shape.end()),
          row_bytes_(element_count(row_shape_) * type_.size_bytes()) {}

    const pinflow::dtype& dtype() const noexcept override { return type_; }
    const shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept override { return row_bytes_; }
    std::string description() const override { return "rows of a Python object"; }
    std::span<const row_extent> extents() const noexcept override { return {}; }
    void check_unchanged() const override {}

    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override {
        for (const std::uint64_t id : ids) {
            if (id >= row_count_) throw invalid_argument("a row number is not below the number of rows");
        }
        if (ids.empty() || destination.empty()) return {};
        const nb::gil_scoped_acquire acquired;
        try {
            const nb::object numbers =
                memory_view(const_cast<std::uint64_t*>(ids.data()), ids.size_bytes(), PyBUF_READ)
                    .attr("cast")("Q");
            const nb::object out = memory_view(destination.data(), destination.size(), PyBUF_WRITE);
            nb::borrow(source_.get()).attr("read_rows")(numbers, out);
            // the memory is reused: what the source has kept must not reach it
            out.attr("release")();
            numbers.attr("release")();
        } catch (const nb::python_error& raised) {
            throw python_failure(raised);
        }
        return {};
    }

 private:
    std::shared_ptr<PyObject> source_;
    pinflow::dtype type_;
    std::uint64_t row_count_;
    shape_vector row_shape_;
    std::uint64_t row_bytes_;
};

}  // namespace

std::shared_ptr<opened_array> array_of_buffer(const nb::object& object, const std::string& type,
                                              const shape_vector& shape) {
    PyObject* const view = PyMemoryView_FromObject(object.ptr());
    if (view == nullptr) throw nb::python_error();
    const nb::object exported = nb::steal(view);
    const buffer memory(exported, false);
    const std::span<std::byte> bytes = memory.bytes();
    auto* const owner = new std::shared_ptr<PyObject>(keep(exported));
    memory_region region(
        bytes.data(), bytes.size(),
        [](std::byte*, std::uint64_t, void* context) noexcept {
            delete static_cast<std::shared_ptr<PyObject>*>(context);
        },
        owner);
    return opened_array::of_array(array(std::move(region), dtype::parse(type), shape));
}

std::shared_ptr<opened_array> array_of_source(const nb::object& source) {
    const auto type = dtype::parse(nb::cast<std::string>(nb::str(source.attr("dtype"))));
    const auto shape = nb::cast<shape_vector>(source.attr("shape"));
    if (shape.empty())
        throw invalid_argument("a source of rows needs a shape whose first length is the row count");
    if (!type.is_little_endian())
        throw invalid_argument(
            "a source of rows delivers little-endian elements, and its dtype is big-endian");
    std::shared_ptr<PyObject> kept = keep(source);
    auto made = opened_array::of_rows(std::make_shared<python_rows>(kept, type, shape));
    made->kept = std::move(kept);
    return made;
}

}  // namespace pinflow::python
