#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "pinflow/error.hpp"

namespace pinflow::python {

/// An exception of a Python source or order that C++ code called, on any thread. Raised again where it
/// reaches the Python caller.
class python_failure final : public error {
 public:
    /// Keeps the exception object of `raised`. Needs the GIL.
    explicit python_failure(const nanobind::python_error& raised);

    PyObject* exception() const noexcept { return exception_.get(); }

 private:
    std::shared_ptr<PyObject> exception_;
};

/// Translates pinflow's C++ exceptions to the classes of `errors`, a Python module with one class for each.
void register_errors(const nanobind::module_& errors);

}  // namespace pinflow::python
