#include "src/python/native/python_rows.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <pthread.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/read_stop.hpp"
#include "src/python/native/buffer.hpp"
#include "src/python/native/errors.hpp"
#include "src/python/native/python_owner.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

nb::object view_of(const nb::object& bytes) {
    PyObject* const view = PyMemoryView_FromObject(bytes.ptr());
    if (view == nullptr) throw nb::python_error();
    return nb::steal(view);
}

class python_rows final : public row_source {
 public:
    python_rows(std::shared_ptr<PyObject> source, pinflow::dtype type, const shape_vector& shape,
                std::string description)
        : source_(std::move(source)),
          description_(std::move(description)),
          type_(std::move(type)),
          row_count_(shape.front()),
          row_shape_(shape.begin() + 1, shape.end()),
          row_bytes_(element_count(row_shape_) * type_.size_bytes()) {
        const std::scoped_lock lock(live().mutex);
        live().all.insert(this);
    }
    python_rows(const python_rows&) = delete;
    python_rows& operator=(const python_rows&) = delete;
    ~python_rows() override {
        const std::scoped_lock lock(live().mutex);
        live().all.erase(this);
    }

    const pinflow::dtype& dtype() const noexcept override { return type_; }
    const shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept override { return row_bytes_; }
    std::string description() const override { return description_; }
    std::span<const row_extent> extents() const noexcept override { return {}; }
    void check_unchanged() const override {}

    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override {
        for (const std::uint64_t id : ids) {
            if (id >= row_count_) throw invalid_argument("a row number is not below the number of rows");
        }
        if (ids.empty() || destination.empty()) return {};
        if (is_ending()) throw error("Python is about to end, so its rows cannot be read");
        if (python_callback::is_running_of(source_.get()))
            throw invalid_argument(description_ + ": its read_rows cannot read rows of the same source");
        // one call at a time: the GIL changes hands within Python code
        const std::lock_guard lock(mutex_);
        if (detail::read_stop::is_requested()) throw error("the loader has been closed");
        const detail::read_stop none;  // for what the Python code itself reads
        const nb::gil_scoped_acquire acquired;
        const python_callback running(source_.get());
        try {
            // Python objects own both buffers, so a view that outlives the call (in a traceback, for example)
            // stays valid
            const nb::bytes numbers(ids.data(), ids.size_bytes());
            const nb::object out = nb::steal(
                PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(destination.size())));
            if (!out.is_valid()) throw nb::python_error();
            const nb::object result =
                nb::borrow(source_.get()).attr("read_rows")(view_of(numbers).attr("cast")("Q"), view_of(out));
            if (!result.is_none())
                throw invalid_argument(description_ +
                                       ": read_rows writes the rows to `out` and returns None, but it "
                                       "returned something");
            std::memcpy(destination.data(), PyByteArray_AsString(out.ptr()), destination.size());
        } catch (const nb::python_error& raised) {
            throw python_failure(raised);
        }
        return {};
    }

 private:
    /// All objects of this process. A thread of the parent may be in a call when it forks; in the child there
    /// is no such thread, so the child makes every mutex anew.
    struct registry {
        std::mutex mutex;
        std::set<const python_rows*> all;
    };
    static registry& live() {
        static registry& only = *new registry;
        static const int status = ::pthread_atfork([] { live().mutex.lock(); }, [] { live().mutex.unlock(); },
                                                   [] {
                                                       for (const python_rows* const each : live().all)
                                                           new (&each->mutex_) std::mutex;
                                                       live().mutex.unlock();
                                                   });
        static_cast<void>(status);  // if it failed, a child may find a locked source
        return only;
    }

    mutable std::mutex mutex_;  ///< taken before the GIL
    std::shared_ptr<PyObject> source_;
    std::string description_;
    pinflow::dtype type_;
    std::uint64_t row_count_;
    shape_vector row_shape_;
    std::uint64_t row_bytes_;
};

}  // namespace

std::shared_ptr<opened_array> array_of_buffer(const nb::object& object, const std::string& type,
                                              const shape_vector& shape, std::uint64_t stride_bytes,
                                              const std::string& label) {
    const nb::object exported = view_of(object);
    const buffer memory(exported, false);
    const std::span<std::byte> bytes = memory.bytes();
    auto* const owner = new std::shared_ptr<PyObject>(keep(exported));
    memory_region region(
        bytes.data(), bytes.size(),
        [](std::byte*, std::uint64_t, void* context) noexcept {
            delete static_cast<std::shared_ptr<PyObject>*>(context);
        },
        owner);
    const array elements = stride_bytes == 0 ? array(std::move(region), dtype::parse(type), shape)
                                             : array::of_strided_memory(std::move(region), dtype::parse(type),
                                                                        shape, stride_bytes);
    return opened_array::of_array(label.empty() ? elements : elements.labelled(label));
}

std::shared_ptr<opened_array> array_of_source(const nb::object& source, const std::string& type,
                                              const shape_vector& shape, const std::string& label) {
    const auto element = dtype::parse(type);
    const std::string description = label.empty() ? "rows of a Python object" : label;
    if (shape.empty())
        throw invalid_argument(description + ": the shape needs a first length, the number of rows");
    if (!element.is_little_endian())
        throw invalid_argument(description +
                               ": rows are delivered little-endian, and the dtype is big-endian");
    std::shared_ptr<PyObject> kept = keep(source);
    auto made = opened_array::of_rows(std::make_shared<python_rows>(kept, element, shape, description));
    made->readers = {kept.get()};
    made->kept = std::move(kept);
    return made;
}

}  // namespace pinflow::python
