#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "pinflow/loader/sampler.hpp"

namespace pinflow::python {

/// An order that Python gives.
struct python_order {
    /// The row numbers of an epoch, as a buffer of 64-bit numbers, or an object with `name`, `position_count`
    /// and `rows_at(epoch, first, out)`, which fills `out`, a memoryview of 64-bit numbers, with the rows at
    /// the positions from `first` on. Threads of a loader call `rows_at` with the GIL.
    std::shared_ptr<PyObject> kept;

    sampler for_rows(std::uint64_t row_count) const;
};

}  // namespace pinflow::python
