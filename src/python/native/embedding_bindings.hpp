#pragma once

#include <nanobind/nanobind.h>

namespace pinflow::python {

void bind_embedding_tables(nanobind::module_& module);

}  // namespace pinflow::python
