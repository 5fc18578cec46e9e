#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "src/rows/call_transfer.hpp"

namespace pinflow::detail {

namespace {

class engine_transfer final : public call_transfer {
 public:
    explicit engine_transfer(const exchange_setup& setup) : setup_(setup) {}

    /// The host reads the indices to enqueue the copies, so the device needs no order.
    bool needs_order(const row_call& /*call*/) const override { return false; }

    void move(row_call& call, std::uint64_t begin, std::uint64_t end) override {
        call.is_gather() ? gather(call, begin, end) : scatter(call, begin, end);
    }

 private:
    /// The address in its batch of the row at `position`.
    static std::byte* in_batch(const row_call& call, std::uint64_t position) {
        const row_parts& parts = call.transfer().parts;
        const auto* const next = std::upper_bound(parts.first, parts.first + parts.count, position);
        const auto part = static_cast<std::size_t>(next - parts.first) - 1;
        return parts.rows[part] + (position - parts.first[part]) * call.transfer().table.row_size_bytes;
    }

    void gather(const row_call& call, std::uint64_t begin, std::uint64_t end) const {
        const std::uint64_t row_bytes = setup_.table.row_size_bytes();
        std::vector<copy_range> ranges;
        ranges.reserve(end - begin);
        for (std::uint64_t i = begin; i < end; ++i) {
            ranges.push_back(
                {in_batch(call, i), setup_.table.data() + call.host_ids()[i] * row_bytes, row_bytes});
        }
        copy_batch_to_device_async(ranges, call.stream());
    }

    void scatter(const row_call& call, std::uint64_t begin, std::uint64_t end) const {
        const std::uint64_t row_bytes = setup_.table.row_size_bytes();
        const std::uint64_t* const ids = call.host_ids();
        std::vector<host_copy_range> ranges;
        for (const std::uint64_t i : last_occurrences({ids + begin, end - begin})) {
            ranges.push_back({const_cast<std::byte*>(setup_.table.data()) + ids[begin + i] * row_bytes,
                              in_batch(call, begin + i), row_bytes});
        }
        copy_batch_to_host_async(ranges, call.stream());
    }

    /// The position of the last occurrence of each index, in ascending order. Copies of one batch run in any
    /// order, so only this row of equal indices is copied.
    static std::vector<std::uint32_t> last_occurrences(std::span<const std::uint64_t> ids) {
        std::vector<std::uint32_t> order(ids.size());
        for (std::uint32_t i = 0; i < ids.size(); ++i)
            order[i] = i;
        std::ranges::sort(order, {}, [&](std::uint32_t i) { return std::pair(ids[i], i); });
        std::vector<std::uint32_t> last;
        for (std::size_t i = 0; i < order.size(); ++i) {
            if (i + 1 == order.size() || ids[order[i]] != ids[order[i + 1]]) last.push_back(order[i]);
        }
        std::ranges::sort(last);
        return last;
    }

    const exchange_setup& setup_;
};

}  // namespace

std::unique_ptr<call_transfer> make_engine_transfer(const exchange_setup& setup) {
    return std::make_unique<engine_transfer>(setup);
}

}  // namespace pinflow::detail
