#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "src/core/quote.hpp"

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

/// The name of an array, as a str. Bytes that are not UTF-8 are escaped, such as "\xe9".
inline nanobind::object name_text(std::string_view name) {
    return nanobind::steal(
        PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "backslashreplace"));
}

/// A sentence that may contain paths, as a str of one line. Bytes that are not UTF-8, and characters that a
/// terminal obeys, are escaped, such as "\xe9" and "\n".
inline nanobind::object readable(std::string_view sentence) {
    std::string escaped;
    for (std::size_t position = 0; position < sentence.size();)
        escaped += pinflow::detail::next_escaped(sentence, position);
    return name_text(escaped);
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
