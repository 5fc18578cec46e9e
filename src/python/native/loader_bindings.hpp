#pragma once

#include <nanobind/nanobind.h>

namespace pinflow::python {

void bind_loaders(nanobind::module_& module);

}  // namespace pinflow::python
