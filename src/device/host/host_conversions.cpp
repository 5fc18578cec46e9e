#include "src/device/host/host_conversions.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "src/core/cast.hpp"

namespace pinflow::detail {

namespace {

constexpr std::size_t block_elements = 256;

/// Where the element goes whose position in stored order is `index`.
std::uint64_t destination_index(const device_conversion& work, std::uint64_t index) {
    std::uint64_t element = 0;
    for (std::uint32_t axis = 0; axis < work.axis_count; ++axis) {
        element += index % work.axes[axis].length * work.axes[axis].stride;
        index /= work.axes[axis].length;
    }
    return element;
}

/// Converts up to block_elements elements.
void convert_block(const device_conversion& work, std::uint64_t begin, std::uint64_t count) {
    constexpr std::size_t max_element_bytes = 16;
    std::array<std::byte, block_elements * max_element_bytes> stored, cast;
    const std::uint64_t from_bytes = size_bytes_of(work.from), to_bytes = size_bytes_of(work.to);
    std::memcpy(stored.data(), work.source + begin * from_bytes, count * from_bytes);
    for (std::uint64_t word = 0; work.swap_size_bytes > 1 && word < count * from_bytes;
         word += work.swap_size_bytes)
        std::reverse(stored.data() + word, stored.data() + word + work.swap_size_bytes);
    const std::byte* elements = stored.data();
    if (!is_opaque(work.from)) {
        cast_elements(dtype_of(work.from), stored.data(), dtype_of(work.to), cast.data(), count);
        elements = cast.data();
    }
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t place =
            work.axis_count == 0 ? begin + i : destination_index(work, work.first + begin + i);
        std::memcpy(work.destination + place * to_bytes, elements + i * to_bytes, to_bytes);
    }
}

}  // namespace

void convert_on_host(const device_conversion& work) {
    for (std::uint64_t begin = 0; begin < work.count; begin += block_elements)
        convert_block(work, begin, std::min<std::uint64_t>(block_elements, work.count - begin));
}

}  // namespace pinflow::detail
