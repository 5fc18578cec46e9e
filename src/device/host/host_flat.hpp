#pragma once

#include "src/device/flat_work.hpp"

/// The host device's operations on flat parameters. They run on the worker threads, and return when they are
/// done. They give the same bits as CUDA's.
namespace pinflow::detail::host_flat {

void check(const gradient_check& work);
void step(const flat_step& work);

}  // namespace pinflow::detail::host_flat
