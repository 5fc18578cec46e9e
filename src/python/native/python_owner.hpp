#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>

#include <memory>

namespace pinflow::python {

/// Keeps a Python object for C++ code. The result may be destroyed on any thread, with or without the GIL:
/// the reference is dropped later, by a thread that has it. Needs the GIL.
std::shared_ptr<PyObject> keep(nanobind::handle object);

/// Drops a reference. A thread that has a state of Python drops it at once, and takes the GIL for that:
/// PyTorch releases the GIL while it frees a tensor. Other threads, and those that may not take the GIL
/// because Python is ending, leave it as what `keep` returns does. May run Python code, so the caller must
/// hold no lock.
void drop(PyObject* object) noexcept;

/// Type slots by which Python's garbage collector finds cycles through `T::kept`, a
/// `std::shared_ptr<PyObject>` that `keep` made. To be given to the nanobind class of T as
/// `collected_slots<T>`.
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

/// Drops the references that were given up without the GIL. Needs the GIL. Calls that open, load or export
/// arrays, deliver batches, or gather and scatter rows do it first. Otherwise a pending call of the
/// interpreter does.
void drop_given_up() noexcept;

/// To be called when Python is about to end: from here on, other threads must not take the GIL.
void begin_ending() noexcept;
/// Whether that has been called.
bool is_ending() noexcept;
/// Whether Python is ending and this thread must not take the GIL any more.
bool may_not_take_gil() noexcept;
/// Drops the references that were given up. Those given up later are never dropped.
void stop_dropping() noexcept;

/// Marks that this thread runs a Python callback of `object`, a source of rows or an order.
class python_callback {
 public:
    explicit python_callback(const PyObject* object) noexcept;
    python_callback(const python_callback&) = delete;
    python_callback& operator=(const python_callback&) = delete;
    ~python_callback();
    /// Whether this thread runs one. It may be a thread of a loader.
    static bool is_running() noexcept;
    /// Whether this thread runs one of `object`.
    static bool is_running_of(const PyObject* object) noexcept;

 private:
    const PyObject* object_;
    const python_callback* outer_;
};

/// Holds the GIL during its lifetime. Part of with_gil.
class gil_acquire {
 public:
    gil_acquire();
    gil_acquire(const gil_acquire&) = delete;
    gil_acquire& operator=(const gil_acquire&) = delete;
    ~gil_acquire() { PyGILState_Release(state_); }

 private:
    PyGILState_STATE state_;
};

/// Blocks this thread until the process ends.
[[noreturn]] void block_forever() noexcept;

/// Calls `function` with the GIL, on a thread whose GIL a call has released. Once Python is ending, blocks
/// forever instead of taking the GIL, also in Python code that `function` calls. A thread in a
/// python_callback still takes it: loaders wait for callbacks before they end. Versions of Python before 3.14
/// would end such a thread by pthread_exit, which unwinds the stack. That ends the process in a noexcept
/// function, and ~gil_acquire would release a GIL that the thread does not hold.
template <typename Function>
auto with_gil(Function function) {
    const gil_acquire held;
    try {
        return function();
    } catch (const abi::__forced_unwind&) {
        block_forever();
    }
}

/// Releases the GIL during its lifetime. Once Python is ending, the destructor blocks as with_gil does.
class gil_release {
 public:
    gil_release() noexcept : state_(PyEval_SaveThread()) {}
    gil_release(const gil_release&) = delete;
    gil_release& operator=(const gil_release&) = delete;
    ~gil_release();

 private:
    PyThreadState* state_;
};

}  // namespace pinflow::python
