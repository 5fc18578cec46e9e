#include "src/python/native/python_order.hpp"

#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/python/native/buffer.hpp"
#include "src/python/native/errors.hpp"
#include "src/python/native/python_owner.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

class python_sequence final : public row_sequence {
 public:
    explicit python_sequence(std::shared_ptr<PyObject> order)
        : order_(std::move(order)),
          name_(nb::cast<std::string>(nb::borrow(order_.get()).attr("name"))),
          position_count_(nb::cast<std::uint64_t>(nb::borrow(order_.get()).attr("position_count"))) {}

    std::string name() const override { return name_; }
    std::uint64_t position_count() const override { return position_count_; }

    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const override {
        // one call at a time, as orders written in Python may expect; taken without the GIL
        const std::scoped_lock lock(calls_);
        if (is_ending()) throw error("Python is about to end, so rows_at of its order cannot be called");
        const nb::gil_scoped_acquire acquired;
        const python_callback running(order_.get());
        try {
            // a Python object owns the buffer, as in python_rows
            const nb::object bytes =
                nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(rows.size_bytes())));
            if (!bytes.is_valid()) throw nb::python_error();
            const nb::object view = nb::steal(PyMemoryView_FromObject(bytes.ptr()));
            if (!view.is_valid()) throw nb::python_error();
            // positions that rows_at does not write hold an invalid row number, which is refused later
            std::memset(PyByteArray_AsString(bytes.ptr()), 0xff, rows.size_bytes());
            const nb::object result =
                nb::borrow(order_.get()).attr("rows_at")(epoch, first, view.attr("cast")("Q"));
            if (!result.is_none())
                throw invalid_argument(
                    "the order '" + name_ +
                    "': rows_at returned a value; it must write the row numbers to `out` and return None");
            std::memcpy(rows.data(), PyByteArray_AsString(bytes.ptr()), rows.size_bytes());
        } catch (const nb::python_error& raised) {
            throw python_failure(raised);
        }
    }

 private:
    std::shared_ptr<PyObject> order_;
    std::string name_;
    std::uint64_t position_count_;
    mutable std::mutex calls_;
};

}  // namespace

sampler python_order::for_rows(std::uint64_t row_count) const {
    const nb::object order = nb::borrow(kept.get());
    if (nb::hasattr(order, "rows_at"))
        return sampler::custom(row_count, std::make_shared<python_sequence>(kept));
    const buffer numbers(order, false);
    const auto bytes = numbers.bytes();
    std::vector<std::uint64_t> rows(bytes.size() / sizeof(std::uint64_t));
    if (!rows.empty()) std::memcpy(rows.data(), bytes.data(), rows.size() * sizeof(std::uint64_t));
    return sampler::listed(row_count, std::move(rows));
}

}  // namespace pinflow::python
