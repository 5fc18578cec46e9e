#pragma once

#include <nanobind/nanobind.h>

namespace pinflow::python {

void bind_flat_parameters(nanobind::module_& module);

}  // namespace pinflow::python
