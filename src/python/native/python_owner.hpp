#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace pinflow::python {

/// Keeps a Python object for C++ code. The result may be destroyed on any thread, with or without the GIL:
/// the reference is dropped later, by a thread that has it. Needs the GIL.
std::shared_ptr<PyObject> keep(nanobind::handle object);

/// For objects that Python's garbage collector asks for a reference that `keep` made: slots of a class whose
/// objects of type T have a member `std::shared_ptr<PyObject> kept`.
template <typename T>
int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nanobind::inst_ready(self)) Py_VISIT(nanobind::inst_ptr<T>(self)->kept.get());
    return 0;
}
template <typename T>
int clear(PyObject* self) {
    nanobind::inst_ptr<T>(self)->kept.reset();
    return 0;
}
template <typename T>
PyType_Slot collected_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse<T>)},
                                 {Py_tp_clear, reinterpret_cast<void*>(&clear<T>)},
                                 {0, nullptr}};

/// Drops the references that were given up without the GIL. Needs the GIL. Every call from Python does it.
void drop_given_up() noexcept;

/// From here on, references are not dropped any more: Python is about to end.
void stop_dropping() noexcept;

}  // namespace pinflow::python
