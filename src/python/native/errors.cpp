#include "src/python/native/errors.hpp"

#include <nanobind/stl/string.h>

#include <system_error>

#include "pinflow/formats/open.hpp"
#include "src/python/native/file_name.hpp"
#include "src/python/native/python_owner.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

/// The module with the exception classes; never released.
PyObject* classes = nullptr;

void raise(const char* name, const char* message) {
    const nb::object type = nb::borrow(classes).attr(name);
    PyErr_SetObject(type.ptr(), readable(message).ptr());
}

/// As with OSError, the number decides which class it is.
void raise_system_failure(const system_failure& failure) {
    const char* name = "SystemFailure";
    if (failure.code() == std::errc::no_such_file_or_directory) name = "NotFound";
    if (failure.code() == std::errc::file_exists) name = "AlreadyThere";
    if (failure.code() == std::errc::permission_denied ||
        failure.code() == std::errc::operation_not_permitted)
        name = "NotPermitted";
    const nb::object type = nb::borrow(classes).attr(name);
    const nb::object raised = type(failure.code().value(), readable(failure.what()));
    PyErr_SetObject(type.ptr(), raised.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const python_failure& failure) {
        PyErr_SetObject(PyExceptionInstance_Class(failure.exception()), failure.exception());
    } catch (const system_failure& failure) {
        raise_system_failure(failure);
    } catch (const format_error& failure) {
        raise("FormatError", failure.what());
    } catch (const format_not_built& failure) {
        raise("FormatNotBuilt", failure.what());
    } catch (const unsupported& failure) {
        raise("Unsupported", failure.what());
    } catch (const state_mismatch& failure) {
        raise("StateMismatch", failure.what());
    } catch (const invalid_argument& failure) {
        raise("InvalidArgument", failure.what());
    } catch (const data_changed& failure) {
        raise("DataChanged", failure.what());
    } catch (const all_slots_leased& failure) {
        raise("AllSlotsLeased", failure.what());
    } catch (const fatal_device_error& failure) {
        raise("FatalDeviceError", failure.what());
    } catch (const device_error& failure) {
        raise("DeviceError", failure.what());
    } catch (const error& failure) {
        raise("Error", failure.what());
    }
}

std::string text_of(const nb::python_error& raised) {
    PyObject* const text = PyObject_Str(raised.value().ptr());
    Py_ssize_t size = 0;
    const char* const bytes = text == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(text, &size);
    std::string copy = bytes == nullptr ? "an exception of Python whose text cannot be shown"
                                        : std::string(bytes, static_cast<std::size_t>(size));
    Py_XDECREF(text);
    PyErr_Clear();
    return copy;
}

/// What a loop raises for an exception of a callback. StopIteration would end the loop as if all was
/// delivered.
nb::object exception_of(const nb::python_error& raised) {
    nb::object exception = nb::borrow(raised.value());
    if (PyErr_GivenExceptionMatches(exception.ptr(), PyExc_StopIteration) == 0) return exception;
    nb::object replaced = nb::steal(
        PyObject_CallFunction(PyExc_RuntimeError, "s", "a source of rows or an order raised StopIteration"));
    if (!replaced.is_valid()) {
        PyErr_Clear();
        return exception;
    }
    PyException_SetCause(replaced.ptr(), exception.release().ptr());
    return replaced;
}

}  // namespace

python_failure::python_failure(const nb::python_error& raised)
    : error(text_of(raised)), exception_(keep(exception_of(raised))) {}

void register_errors(const nb::module_& errors) {
    classes = nb::borrow(errors).release().ptr();
    nb::register_exception_translator(translate);
}

}  // namespace pinflow::python
