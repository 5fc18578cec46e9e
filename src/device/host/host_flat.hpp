#pragma once

#include "src/device/flat_work.hpp"

/// The host device's operations on flat parameters. They run on the worker threads, and return when they are
/// done. They give the same bits as CUDA's.
namespace pinflow::detail::host_flat {

void look(const gradient_look& work);
void step(const flat_step& work);

}  // namespace pinflow::detail::host_flat
