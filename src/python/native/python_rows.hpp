#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "pinflow/array.hpp"
#include "src/python/native/opened_array.hpp"

namespace pinflow::python {

/// An array over the memory of a Python object with the buffer protocol, which it keeps. Messages call it
/// `label`. Rows start `stride_bytes` apart; 0: they are contiguous.
std::shared_ptr<opened_array> array_of_buffer(const nanobind::object& object, const std::string& type,
                                              const shape_vector& shape, std::uint64_t stride_bytes,
                                              const std::string& label);

/// Rows of a type and shape (rows first) that a Python object reads. Its `read_rows(ids, out)` writes the
/// rows of `ids`, a memoryview of 64-bit numbers, to the memoryview of bytes `out`. Threads of a loader call
/// it with the GIL.
std::shared_ptr<opened_array> array_of_source(const nanobind::object& source, const std::string& type,
                                              const shape_vector& shape, const std::string& label);

}  // namespace pinflow::python
