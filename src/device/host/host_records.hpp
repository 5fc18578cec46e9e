#pragma once

#include "src/device/record_work.hpp"

/// The operations on records, on the host.
namespace pinflow::detail::host_records {

void patch(const record_patch& work);
void update(const record_update& work);

}  // namespace pinflow::detail::host_records
