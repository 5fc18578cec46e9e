#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace pinflow::python {

/// A path as the system's bytes, which need not be UTF-8. Python represents it as a str (os.fsdecode).
struct file_name {
    std::string bytes;
};

/// The str that Python has for the system's bytes.
inline nanobind::object text_of(const std::string& path) {
    return nanobind::steal(
        PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

/// A sentence that may contain paths, as a str. Bytes that are not UTF-8 are escaped, such as "\xe9".
inline nanobind::object readable(std::string_view sentence) {
    return nanobind::steal(
        PyUnicode_DecodeUTF8(sentence.data(), static_cast<Py_ssize_t>(sentence.size()), "backslashreplace"));
}

}  // namespace pinflow::python

namespace nanobind::detail {

/// nanobind converts function arguments with it.
template <>
struct type_caster<pinflow::python::file_name> {
    NB_TYPE_CASTER(pinflow::python::file_name, const_name("str"))

    // NOLINTNEXTLINE(readability-identifier-naming): nanobind's names
    bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
        if (!PyUnicode_Check(source.ptr())) return false;
        const object encoded = steal(PyUnicode_EncodeFSDefault(source.ptr()));
        char* begin = nullptr;
        Py_ssize_t size_bytes = 0;
        if (!encoded.is_valid() || PyBytes_AsStringAndSize(encoded.ptr(), &begin, &size_bytes) != 0) {
            PyErr_Clear();
            return false;
        }
        value.bytes.assign(begin, static_cast<std::size_t>(size_bytes));
        return true;
    }
};

}  // namespace nanobind::detail
