#pragma once

#include <cstdint>
#include <functional>

#include "src/device/conversion_work.hpp"
#include "src/load/load_plan.hpp"

/// Chunked datasets whose bands of chunks along axis 0 are larger than a unit. They are decoded in boxes of
/// whole chunks, so that no chunk is decoded twice. The conversion kernel, or the CPU on the host device,
/// scatters each box.
namespace pinflow::detail {

/// A part of a tensor.
struct element_box {
    shape_vector first;  ///< along each axis, in the stored tensor
    shape_vector lengths;
};

/// Whether a job is decoded in boxes. On a GPU, one chunk must fit into a staging buffer, and the device must
/// be able to move the elements.
bool is_decoded_in_boxes(const opened_tensors& opened, const load_job& job, const pinflow::device& device);

/// Calls take(begin_bytes, size_bytes) for the piece of each box, which begins with the first element of the
/// box, and has its size.
void for_each_box(const opened_tensors& opened, const load_job& job,
                  const std::function<void(std::uint64_t begin_bytes, std::uint64_t size_bytes)>& take);

/// The box of such a piece.
element_box box_of(const opened_tensors& opened, const load_job& job, const load_piece& piece);

/// Whether the elements of a box follow each other in the job as delivered.
bool is_contiguous(const element_box& box, const shape_vector& delivered);

/// How a GPU scatters the elements of a box.
/// @param memory the first byte of the job, in device memory
device_conversion scatter_of(const opened_tensors& opened, const load_job& job, const load_piece& piece,
                             const std::byte* decoded, std::byte* memory);

/// Scatters a decoded box into the elements of a job in host memory.
/// @param memory the first byte of the job
void scatter_on_host(const opened_tensors& opened, const load_job& job, const load_piece& piece,
                     const std::byte* decoded, std::byte* memory);

}  // namespace pinflow::detail
