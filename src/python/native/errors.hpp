#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "pinflow/error.hpp"

namespace pinflow::python {

/// An exception that Python code raised on one of pinflow's threads. Raised again where it reaches Python.
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
