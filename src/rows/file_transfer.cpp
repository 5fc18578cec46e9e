#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <array>
#include <exception>
#include <span>

#include "src/core/fault_guard.hpp"
#include "src/core/row_copy.hpp"
#include "src/rows/call_transfer.hpp"
#include "src/rows/cpu_rows.hpp"

/// Rows of a file on the host device, without staging buffers. The CPU copies them under the fault guard, or
/// reads them with pread if the guard is not installed, because the file may be truncated at any time.
namespace pinflow::detail {

namespace {

/// @return whether all rows were copied. If not, some may have been.
bool copy_guarded(const row_table& table, std::span<const std::uint64_t> ids, std::byte* to) noexcept {
    return is_guarded_thread() && run_guarded([=, data = table.data(), size = table.row_size_bytes()] {
               // some rows at a time, so that their addresses stay in the cache
               std::array<const std::byte*, 256> rows;
               for (std::size_t first = 0; first < ids.size(); first += rows.size()) {
                   const auto part = ids.subspan(first, std::min(rows.size(), ids.size() - first));
                   std::ranges::transform(part, rows.begin(),
                                          [=](std::uint64_t id) { return data + id * size; });
                   copy_rows(std::span(rows).first(part.size()), size, to + first * size);
               }
           });
}

/// Gathers the rows at `begin` ... `end` - 1 of a call, which may belong to several batches.
void gather_part(const row_table& table, const std::uint64_t* ids, const row_parts& parts,
                 std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t size_bytes = table.row_size_bytes();
    std::size_t batch = static_cast<std::size_t>(
        std::upper_bound(parts.first, parts.first + parts.count, begin) - parts.first - 1);
    for (std::uint64_t at = begin; at < end; ++batch) {
        const std::uint64_t last = std::min<std::uint64_t>(end, parts.first[batch + 1]);
        if (at == last) continue;  // a batch without rows
        const std::span part(ids + at, last - at);
        std::byte* const rows = parts.rows[batch] + (at - parts.first[batch]) * size_bytes;
        if (!copy_guarded(table, part, rows))
            static_cast<void>(table.source()->read_rows(part, {rows, part.size() * size_bytes}));
        at = last;
    }
}

class file_transfer final : public call_transfer {
 public:
    file_transfer(const exchange_setup& setup, tbb::task_arena& arena) : setup_(setup), arena_(arena) {}

    bool needs_order(const row_call& call) const override { return call.has_device_ids(); }

    void move(row_call& call, std::uint64_t begin, std::uint64_t end) override {
        const std::uint64_t* const ids = needs_order(call) ? call.transfer().order.ids : call.host_ids();
        call.stream().host_function_async([this, parts = call.transfer().parts, ids, begin, end,
                                           errors = call.errors(), wrong = call.reported_errors()] {
            if (wrong->outside_count != 0) return;
            try {
                gather(ids, parts, begin, end);
            } catch (...) {
                errors->add(std::current_exception());
            }
        });
    }

 private:
    void gather(const std::uint64_t* ids, const row_parts& parts, std::uint64_t begin,
                std::uint64_t end) const {
        const row_table& table = setup_.table;
        const std::uint64_t grain = std::max<std::uint64_t>(bytes_of_cpu_task / table.row_size_bytes(), 1);
        if (end - begin <= grain) return gather_part(table, ids, parts, begin, end);
        arena_.execute([&] {
            tbb::parallel_for(tbb::blocked_range<std::uint64_t>(begin, end, grain),
                              [&](const tbb::blocked_range<std::uint64_t>& range) {
                                  gather_part(table, ids, parts, range.begin(), range.end());
                              });
        });
    }

    const exchange_setup& setup_;
    tbb::task_arena& arena_;
};

}  // namespace

std::unique_ptr<call_transfer> make_file_transfer(const exchange_setup& setup, tbb::task_arena& arena) {
    return std::make_unique<file_transfer>(setup, arena);
}

}  // namespace pinflow::detail
