#pragma once

#include <nanobind/nanobind.h>

namespace pinflow::python {

void bind_loads(nanobind::module_& module);

}  // namespace pinflow::python
