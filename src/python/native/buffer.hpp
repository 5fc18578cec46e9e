#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>

namespace pinflow::python {

/// The contiguous bytes of a Python object with the buffer protocol. Made and destroyed with the GIL.
class buffer {
 public:
    buffer(nanobind::handle object, bool writable) {
        const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
    }
    buffer(const buffer&) = delete;
    buffer& operator=(const buffer&) = delete;
    ~buffer() { PyBuffer_Release(&view_); }

    std::span<std::byte> bytes() const noexcept {
        return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }

 private:
    Py_buffer view_{};
};

}  // namespace pinflow::python
