#pragma once

#include <cstddef>

#include "pinflow/device.hpp"
#include "src/device/conversion_work.hpp"
#include "src/load/load_plan.hpp"

namespace pinflow::detail {

/// Whether the elements of a job change on their way to memory: they are cast, or stored big-endian or in
/// Fortran order.
bool needs_conversion(const opened_tensors& opened, const load_job& job);

/// Whether the device converts them from a staging buffer: a GPU, if it knows their type, and the destination
/// is aligned. The CPU would take longer than the link.
bool can_convert(const opened_tensors& opened, const load_job& job, const pinflow::device& device);

/// Whether a GPU can scatter the elements of a job, as delivered.
bool can_scatter(const opened_tensors& opened, const load_job& job);

/// The conversion of a piece of a job that the device converts.
/// @param staged as read from the file
/// @param memory where the job begins in device memory
device_conversion conversion_of(const opened_tensors& opened, const load_job& job, const load_piece& piece,
                                const std::byte* staged, std::byte* memory);

}  // namespace pinflow::detail
