#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "src/rows/exchange_state.hpp"

namespace pinflow::detail {

/// The route copy: the copy engine moves each row by itself.
void exchange_state::copy_row_by_row(row_call& call) {
    const std::uint64_t row_bytes = table_.row_size_bytes();
    const std::span ids(call.ids_in_host_memory(), call.count);
    auto on_device = [&, part = 0U](std::uint64_t position) mutable {
        while (position >= call.parts.first[part + 1])
            ++part;
        return call.parts.rows[part] + (position - call.parts.first[part]) * row_bytes;
    };
    if (call.is_gather()) {
        std::vector<copy_range> ranges;
        ranges.reserve(call.count);
        for (std::uint64_t i = 0; i < call.count; ++i)
            ranges.push_back({on_device(i), table_.data() + ids[i] * row_bytes, row_bytes});
        return copy_batch_to_device_async(ranges, call.stream);
    }
    // copies of one batch run in any order, so only the last of equal indices is copied
    std::vector<std::uint32_t> order(call.count);
    for (std::uint32_t i = 0; i < call.count; ++i)
        order[i] = i;
    std::ranges::sort(order, {}, [&](std::uint32_t i) { return std::pair(ids[i], i); });
    std::vector<std::uint32_t> last;
    for (std::uint64_t i = 0; i < call.count; ++i) {
        if (i + 1 == call.count || ids[order[i]] != ids[order[i + 1]]) last.push_back(order[i]);
    }
    std::ranges::sort(last);
    std::vector<host_copy_range> ranges;
    ranges.reserve(last.size());
    for (const std::uint32_t i : last) {
        ranges.push_back(
            {const_cast<std::byte*>(table_.data()) + ids[i] * row_bytes, on_device(i), row_bytes});
    }
    copy_batch_to_host_async(ranges, call.stream);
}

}  // namespace pinflow::detail
