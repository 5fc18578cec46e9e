#include <algorithm>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

#include "src/device/copy_ranges.hpp"
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
    /// A row of a call.
    struct row_place {
        std::uint64_t position = 0;    ///< in the call
        std::byte* address = nullptr;  ///< in its batch
        bool is_first = false;         ///< of the positions in its batch
    };
    /// Calls `add(row_place)` for each position.
    /// @param positions in ascending order
    template <typename Positions, typename Add>
    static void for_each_row(const row_call& call, const Positions& positions, Add add) {
        const row_parts& parts = call.transfer().parts;
        std::size_t known = parts.count;
        for (const std::uint64_t position : positions) {
            const auto* const next = std::upper_bound(parts.first, parts.first + parts.count, position);
            const auto part = static_cast<std::size_t>(next - parts.first) - 1;
            const std::uint64_t row = position - parts.first[part];
            add(row_place{position, parts.rows[part] + row * call.transfer().table.row_size_bytes,
                          part != known});
            known = part;
        }
    }

    void gather(const row_call& call, std::uint64_t begin, std::uint64_t end) const {
        const std::uint64_t row_bytes = setup_.table.row_size_bytes();
        std::vector<copy_range> ranges;
        ranges.reserve(end - begin);
        const auto add = [&](const row_place& row) {
            const std::byte* const from = setup_.table.data() + call.host_ids()[row.position] * row_bytes;
            append(ranges, {row.address, from, row_bytes}, row);
        };
        for_each_row(call, std::views::iota(begin, end), add);
        copy_batch_to_device_async(ranges, call.stream());
    }

    void scatter(const row_call& call, std::uint64_t begin, std::uint64_t end) const {
        const std::uint64_t row_bytes = setup_.table.row_size_bytes();
        const std::uint64_t* const ids = call.host_ids();
        std::vector<host_copy_range> ranges;
        const auto add = [&](const row_place& row) {
            auto* const to = const_cast<std::byte*>(setup_.table.data()) + ids[row.position] * row_bytes;
            append(ranges, {to, row.address, row_bytes}, row);
        };
        const auto last = last_occurrences({ids + begin, end - begin});
        for_each_row(call, last | std::views::transform([&](std::uint32_t i) { return begin + i; }), add);
        copy_batch_to_host_async(ranges, call.stream());
    }

    /// Joins rows that follow each other in the table and in one batch. Batches are allocations of their own.
    template <typename Range>
    static void append(std::vector<Range>& ranges, const Range& next, const row_place& row) {
        if (row.is_first) {
            ranges.push_back(next);
        } else {
            append_joined(ranges, next);
        }
    }

    /// The position of the last occurrence of each index, in ascending order. CUDA makes the copies of one
    /// call in any order, so only this row of equal indices is copied.
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
