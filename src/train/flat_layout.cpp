#include "src/train/flat_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow::detail {

flat_type flat_type_of(const parameter_spec& parameter) {
    if (parameter.dtype == dtype::parse("<f2")) return flat_type::float16;
    if (parameter.dtype == dtype::parse("bfloat16")) return flat_type::bfloat16;
    if (parameter.dtype == dtype::of<float>()) return flat_type::float32;
    if (parameter.dtype == dtype::of<double>()) return flat_type::float64;
    throw unsupported(fmt::format(
        "parameter '{}' has the type {}; flat parameters are float16, bfloat16, float32 or float64",
        parameter.name, parameter.dtype.descr()));
}

std::uint64_t state_size_bytes(flat_type type) noexcept {
    return type == flat_type::float64 ? sizeof(double) : sizeof(float);
}

std::uint64_t parameter_size_bytes(const parameter_spec& parameter) {
    std::uint64_t size_bytes = parameter.dtype.size_bytes();
    bool fits = true;
    for (const std::uint64_t length : parameter.shape)  // 0 counts as 1, as in safetensors files
        fits = fits && multiply(size_bytes, std::max<std::uint64_t>(length, 1), size_bytes);
    if (!fits || size_bytes >= std::uint64_t{1} << 61)
        throw invalid_argument(fmt::format("parameter '{}' of shape {} is too large", parameter.name,
                                           to_string(parameter.shape)));
    if (std::ranges::find(parameter.shape, 0U) != parameter.shape.end()) return 0;
    return size_bytes;
}

flat_layout lay_out(std::span<const parameter_spec> parameters) {
    std::vector<flat_type> types;
    types.reserve(parameters.size());
    for (const parameter_spec& parameter : parameters)
        types.push_back(flat_type_of(parameter));
    std::vector<std::size_t> order(parameters.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::sort(order, {}, [&](std::size_t i) { return std::tuple(types[i], parameters[i].group, i); });

    flat_layout layout;
    layout.places.resize(parameters.size());
    for (const std::size_t i : order) {
        const auto group = static_cast<std::uint32_t>(parameters[i].group);
        if (layout.segments.empty() || layout.segments.back().type != types[i] ||
            layout.segments.back().group != group) {
            flat_segment segment;
            segment.begin_pack = segment.end_pack =
                layout.segments.empty() ? 0 : layout.segments.back().end_pack;
            segment.parameter_bytes = layout.buffer_bytes;
            segment.state_bytes = layout.state_bytes;
            segment.group = group;
            segment.type = types[i];
            layout.segments.push_back(segment);
        }
        layout.places[i] = {layout.buffer_bytes, layout.state_bytes};
        const std::uint64_t size_bytes = rounded_up(parameter_size_bytes(parameters[i]), view_alignment);
        const std::uint64_t elements = size_bytes / parameters[i].dtype.size_bytes();
        if (!add(layout.buffer_bytes, size_bytes, layout.buffer_bytes) || layout.buffer_bytes >> 62 != 0)
            throw invalid_argument("the parameters are too large for one buffer");
        layout.state_bytes += elements * state_size_bytes(types[i]);
        layout.segments.back().end_pack += elements / pack_elements;
        if (types[i] == flat_type::float16 || types[i] == flat_type::bfloat16) layout.has_small_types = true;
    }
    std::erase_if(layout.segments, [](const flat_segment& each) { return each.begin_pack == each.end_pack; });
    return layout;
}

}  // namespace pinflow::detail
