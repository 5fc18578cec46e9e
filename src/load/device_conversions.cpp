#include "src/load/device_conversions.hpp"

#include <algorithm>
#include <optional>

#include "src/core/checked.hpp"

namespace pinflow::detail {

namespace {

bool is_long(std::uint64_t length) {
    return length > 1;
}

struct type_pair {
    converted_type from;
    converted_type to;
};

/// Empty if devices do not convert such elements.
std::optional<type_pair> types_of(const opened_tensors& opened, const load_job& job) {
    const dtype& stored = stored_type_of(opened, job);
    if (job.is_cast()) {
        const auto from = float_type_of(stored), to = float_type_of(*job.cast);
        return from && to ? std::optional(type_pair{*from, *to}) : std::nullopt;
    }
    const auto opaque = opaque_type_of(stored.size_bytes());
    return opaque ? std::optional(type_pair{*opaque, *opaque}) : std::nullopt;
}

/// Sets the axes of an array that is delivered with `shape`, and stored in Fortran order.
void set_axes(device_conversion& work, const shape_vector& shape) {
    std::uint64_t stride = element_count(shape);
    for (const std::uint64_t length : shape) {
        stride /= length;
        if (is_long(length)) work.axes[work.axis_count++] = {length, stride};
    }
}

}  // namespace

bool needs_conversion(const opened_tensors& opened, const load_job& job) {
    return job.is_cast() || !opened.stored[job.tensor].is_as_delivered();
}

bool can_convert(const opened_tensors& opened, const load_job& job, const pinflow::device& device) {
    const stored_tensor& stored = opened.stored[job.tensor];
    if (device.kind() == device_kind::host || !stored.offset_bytes || !types_of(opened, job)) return false;
    if (stored.swap_size_bytes > sizeof(std::uint64_t)) return false;
    if (stored.is_fortran_order && std::ranges::count_if(stored.shape, is_long) > device_conversion::max_axes)
        return false;
    return is_multiple(reinterpret_cast<std::uintptr_t>(job.destination), type_of(opened, job).size_bytes());
}

bool can_scatter(const opened_tensors& opened, const load_job& job) {
    const std::uint64_t element_bytes = type_of(opened, job).size_bytes();
    const auto long_axes = std::ranges::count_if(opened.stored[job.tensor].shape, is_long);
    return opaque_type_of(element_bytes) && long_axes <= device_conversion::max_axes &&
           is_multiple(reinterpret_cast<std::uintptr_t>(job.destination), element_bytes);
}

device_conversion conversion_of(const opened_tensors& opened, const load_job& job, const load_piece& piece,
                                const std::byte* staged, std::byte* memory) {
    const stored_tensor& stored = opened.stored[job.tensor];
    const type_pair types = *types_of(opened, job);
    const std::uint64_t to_bytes = size_bytes_of(types.to);
    device_conversion work{.source = staged,
                           .from = types.from,
                           .to = types.to,
                           .swap_size_bytes = stored.swap_size_bytes,
                           .count = piece.size_bytes / to_bytes,
                           .destination = memory};
    if (stored.is_fortran_order) {
        work.first = piece.begin_bytes / to_bytes;
        set_axes(work, shape_of(opened, job));
    } else {
        work.destination += piece.begin_bytes;
    }
    return work;
}

}  // namespace pinflow::detail
