#include "src/load/chunk_boxes.hpp"

#include <algorithm>
#include <cstring>

#include "src/core/checked.hpp"
#include "src/load/device_conversions.hpp"

namespace pinflow::detail {

namespace {

/// Of an element, as stored or as delivered, whichever is larger.
std::uint64_t max_element_bytes(const opened_tensors& opened, const load_job& job) {
    return std::max(stored_type_of(opened, job).size_bytes(), type_of(opened, job).size_bytes());
}

/// The lengths of the boxes: a chunk, which can be read or decoded in place, or, if chunks are small, some
/// beside each other along the last axes. Boxes begin at multiples of them in the stored tensor.
shape_vector box_lengths(const opened_tensors& opened, const load_job& job) {
    const stored_tensor& stored = opened.stored[job.tensor];
    shape_vector lengths(stored.chunk_shape.begin(), stored.chunk_shape.end());
    constexpr std::uint64_t small_chunk_bytes = std::uint64_t{256} << 10;
    constexpr std::uint64_t max_joined_bytes = std::uint64_t{1} << 20;
    std::uint64_t size_bytes = element_count(lengths) * max_element_bytes(opened, job);
    if (size_bytes >= small_chunk_bytes) return lengths;
    for (std::size_t axis = lengths.size(); axis-- > 0;) {
        const std::uint64_t chunks = (stored.shape[axis] - 1) / lengths[axis] + 1;
        const std::uint64_t together = std::clamp<std::uint64_t>(max_joined_bytes / size_bytes, 1, chunks);
        lengths[axis] *= together;
        size_bytes *= together;
        if (together < chunks) break;
    }
    return lengths;
}

}  // namespace

bool is_decoded_in_boxes(const opened_tensors& opened, const load_job& job, const pinflow::device& device) {
    const stored_tensor& stored = opened.stored[job.tensor];
    if (!job.is_decoded || stored.chunk_shape.empty()) return false;
    const std::uint64_t element_bytes = max_element_bytes(opened, job);
    const auto [begin, end] = range_of(opened, job, 0);
    const std::uint64_t row_bytes =
        job.size_bytes / type_of(opened, job).size_bytes() / (end - begin) * element_bytes;
    if (row_bytes <= load_unit_bytes / stored.chunk_shape[0]) return false;
    if (device.kind() == device_kind::host) return true;
    const shape_vector chunk(stored.chunk_shape.begin(), stored.chunk_shape.end());
    return element_count(chunk) <= load_unit_bytes / element_bytes && can_scatter(opened, job);
}

void for_each_box(const opened_tensors& opened, const load_job& job,
                  const std::function<void(std::uint64_t begin_bytes, std::uint64_t size_bytes)>& take) {
    const shape_vector lengths = box_lengths(opened, job);
    const shape_vector shape = shape_of(opened, job);
    const std::uint64_t element_bytes = type_of(opened, job).size_bytes();
    shape_vector first(shape.size());
    for (std::size_t axis = 0; axis < shape.size(); ++axis)
        first[axis] = range_of(opened, job, axis).begin;
    for (;;) {
        std::uint64_t element = 0, count = 1;
        shape_vector next(first);
        for (std::size_t axis = 0; axis < shape.size(); ++axis) {
            const auto [begin, end] = range_of(opened, job, axis);
            next[axis] = std::min((first[axis] / lengths[axis] + 1) * lengths[axis], end);
            element = element * shape[axis] + (first[axis] - begin);
            count *= next[axis] - first[axis];
        }
        take(element * element_bytes, count * element_bytes);
        std::size_t axis = shape.size();
        while (axis-- > 0) {
            const auto [begin, end] = range_of(opened, job, axis);
            first[axis] = next[axis];
            if (first[axis] < end) break;
            first[axis] = begin;
        }
        if (axis == std::size_t(-1)) return;
    }
}

element_box box_of(const opened_tensors& opened, const load_job& job, const load_piece& piece) {
    const shape_vector lengths = box_lengths(opened, job);
    const shape_vector shape = shape_of(opened, job);
    element_box box{shape, shape};
    std::uint64_t rest = piece.begin_bytes / type_of(opened, job).size_bytes();
    for (std::size_t axis = shape.size(); axis-- > 0; rest /= shape[axis]) {
        const auto [begin, end] = range_of(opened, job, axis);
        box.first[axis] = begin + rest % shape[axis];
        box.lengths[axis] =
            std::min((box.first[axis] / lengths[axis] + 1) * lengths[axis], end) - box.first[axis];
    }
    return box;
}

bool is_contiguous(const element_box& box, const shape_vector& delivered) {
    // after the first axis of which the box has several indices, it must have all
    std::size_t axis = 0;
    while (axis < delivered.size() && box.lengths[axis] == 1)
        ++axis;
    for (++axis; axis < delivered.size(); ++axis) {
        if (box.lengths[axis] != delivered[axis]) return false;
    }
    return true;
}

device_conversion scatter_of(const opened_tensors& opened, const load_job& job, const load_piece& piece,
                             const std::byte* decoded, std::byte* memory) {
    const std::uint64_t element_bytes = type_of(opened, job).size_bytes();
    const converted_type type = *opaque_type_of(element_bytes);
    const shape_vector shape = shape_of(opened, job);
    const element_box box = box_of(opened, job, piece);
    device_conversion work{.source = decoded,
                           .from = type,
                           .to = type,
                           .count = piece.size_bytes / element_bytes,
                           .destination = memory + piece.begin_bytes};
    std::uint64_t stride = 1;
    for (std::size_t axis = shape.size(); axis-- > 0; stride *= shape[axis]) {
        if (box.lengths[axis] > 1) work.axes[work.axis_count++] = {box.lengths[axis], stride};
    }
    return work;
}

void scatter_on_host(const opened_tensors& opened, const load_job& job, const load_piece& piece,
                     const std::byte* decoded, std::byte* memory) {
    const shape_vector shape = shape_of(opened, job);
    const element_box box = box_of(opened, job, piece);
    const std::uint64_t run_bytes = box.lengths.back() * type_of(opened, job).size_bytes();
    const std::uint64_t stride_bytes = shape.back() * type_of(opened, job).size_bytes();
    for (std::uint64_t run = 0; run < piece.size_bytes / run_bytes; ++run) {
        std::uint64_t place = 0, item = 1, rest = run;
        for (std::size_t axis = shape.size() - 1; axis-- > 0; rest /= box.lengths[axis]) {
            place += rest % box.lengths[axis] * item;
            item *= shape[axis];
        }
        std::memcpy(memory + piece.begin_bytes + place * stride_bytes, decoded + run * run_bytes, run_bytes);
    }
}

}  // namespace pinflow::detail
