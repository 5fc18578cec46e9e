#pragma once

#include "src/device/conversion_work.hpp"

namespace pinflow::detail {

/// device_backend::convert_to_device of the host device, at once.
void convert_on_host(const device_conversion& work);

}  // namespace pinflow::detail
