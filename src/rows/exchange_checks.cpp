#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/rows/exchange_state.hpp"

/// The checks of a call before anything is enqueued.
namespace pinflow::detail {

sum_type exchange_state::sum_type_of(const dtype& type) {
    if (!type.is_little_endian()) {
        throw unsupported(fmt::format(
            "rows with the same number cannot be added up as {}, in another byte order", type.descr()));
    }
    switch (type.kind()) {
        case dtype_kind::floating:
            if (type.size_bytes() == 2) return sum_type::float16;
            if (type.size_bytes() == 4) return sum_type::float32;
            if (type.size_bytes() == 8) return sum_type::float64;
            break;
        case dtype_kind::bfloat16:
            return sum_type::bfloat16;
        case dtype_kind::signed_integer:
        case dtype_kind::unsigned_integer:
            if (type.size_bytes() == 4) return sum_type::int32;
            if (type.size_bytes() == 8) return sum_type::int64;
            break;
        default:
            break;
    }
    throw unsupported(fmt::format(
        "rows with the same number cannot be added up as {}: only floats and integers of 4 and 8 bytes, "
        "float16 and bfloat16 can",
        type.descr()));
}

/// Checks all of a call but its indices before anything is enqueued.
void exchange_state::check_call(row_direction direction, std::span<const batch> batches,
                                duplicate_policy policy, stream_view stream) const {
    std::uint64_t count = 0;
    bool ids_on_device = false;
    for (std::size_t i = 0; i < batches.size(); ++i) {
        if (i % row_parts::max == 0) count = 0;  // at most this many batches travel together
        const std::uint64_t added = batches[i].ids.size();
        if (added > max_rows_of_call - count) {
            throw invalid_argument(fmt::format(
                "{} rows{} are too many for one call, which takes up to {}", added,
                count == 0 ? "" : fmt::format(" beside {} of other batches", count), max_rows_of_call));
        }
        count += added;
        ids_on_device = ids_on_device || (added > 0 && batches[i].ids.on_device());
        if (added > 0 && batches[i].ids.data() == nullptr) {
            throw invalid_argument(fmt::format("{} row numbers cannot lie at a null pointer", added));
        }
        if (added > 0 && table_.row_size_bytes() > 0 && batches[i].rows == nullptr) {
            throw invalid_argument(
                fmt::format("{} rows of {} bytes cannot be {} a null pointer", added, table_.row_size_bytes(),
                            direction == row_direction::gather ? "gathered to" : "scattered from"));
        }
    }
    check_apart(direction, batches);
    if (stream.device() != device_) {
        throw invalid_argument(fmt::format("rows of an exchange with {} cannot travel in a stream of {}",
                                           device_.name(), stream.device().name()));
    }
    if (device_.backend().is_capturing(stream.native_handle())) {
        throw unsupported(
            "rows cannot travel in a stream that is being captured into a CUDA graph: a call uses its memory "
            "once, "
            "and a graph is launched again and again. Make the call before the capture begins or after it "
            "has ended");
    }
    if (options_.route == row_route::copy && ids_on_device) {
        throw unsupported("the route copy takes row numbers in host memory, as the host enqueues its copies");
    }
    if (direction == row_direction::scatter) {
        if (!table_.writable()) {
            throw unsupported(fmt::format("rows cannot be scattered to {}, which is mapped for reading",
                                          table_.description()));
        }
        if (batches.size() > row_parts::max && policy != duplicate_policy::last) {
            throw unsupported(
                fmt::format("at most {} batches can be scattered in one call, unless the policy is "
                            "duplicate_policy::last",
                            row_parts::max));
        }
        if (options_.route == row_route::copy && policy != duplicate_policy::last) {
            throw unsupported(
                "the route copy writes the last of equal row numbers, and cannot add up or refuse them");
        }
        if (policy == duplicate_policy::sum) check_sums(batches);
    }
}

/// Refuses batches that overlap the table: the order of reads and writes would be undefined.
void exchange_state::check_apart(row_direction direction, std::span<const batch> batches) const {
    const auto table_begin = reinterpret_cast<std::uintptr_t>(table_.data());
    const std::uintptr_t table_end = table_begin + table_.size_bytes();
    for (const batch& each : batches) {
        const auto begin = reinterpret_cast<std::uintptr_t>(each.rows);
        const std::uint64_t end = saturated(each.ids.size(), table_.row_size_bytes(), begin);
        if (begin == end || begin >= table_end || end <= table_begin) continue;
        throw invalid_argument(fmt::format(
            "cannot {} {} rows of {} bytes {} address {:#x}: they overlap {}, which lies from {:#x} to {:#x}",
            direction == row_direction::gather ? "gather" : "scatter", each.ids.size(),
            table_.row_size_bytes(), direction == row_direction::gather ? "to" : "from", begin,
            table_.description(), table_begin, table_end));
    }
}

void exchange_state::check_sums(std::span<const batch> batches) const {
    static_cast<void>(sum_type_of(table_.element()));
    auto bits = reinterpret_cast<std::uintptr_t>(table_.data()) | table_.row_size_bytes();
    for (const batch& each : batches) {
        if (each.ids.size() > 0) bits |= reinterpret_cast<std::uintptr_t>(each.rows);
    }
    if (bits % table_.element().size_bytes() != 0) {
        throw unsupported(
            fmt::format("rows that are not aligned to their elements, of {} bytes, cannot be added up",
                        table_.element().size_bytes()));
    }
}

/// Reports the indices in host memory that are outside the table.
void exchange_state::check_ids(std::span<const row_call> calls) const {
    std::uint64_t outside_count = 0;
    std::uint64_t count = 0;
    std::uint64_t not_seen = 0;
    for (const row_call& call : calls) {
        outside_count += call.outside_count;
        for (const batch& each : call.batches)
            (each.ids.on_device() ? not_seen : count) += each.ids.size();
    }
    if (outside_count == 0) return;
    std::uint64_t position = 0;
    for (const row_call& call : calls) {
        const std::uint64_t* ids = call.host_ids ? call.ids_in_host_memory() : nullptr;
        for (const batch& each : call.batches) {
            const std::uint64_t first = position;
            position += each.ids.size();
            if (each.ids.on_device()) continue;
            const std::span own(ids, each.ids.size());
            ids += own.size();
            const auto wrong =
                std::ranges::find_if(own, [&](std::uint64_t id) { return id >= table_.row_count(); });
            if (wrong == own.end()) continue;
            const std::string what = fmt::format(
                "cannot {} rows of {}{}", call.is_gather() ? "gather" : "scatter", table_.description(),
                not_seen == 0 ? "" : fmt::format(" ({} row numbers in device memory aside)", not_seen));
            throw invalid_argument(outside_sentence(what, outside_count, count, table_.row_count(), *wrong,
                                                    first + static_cast<std::uint64_t>(wrong - own.begin())));
        }
    }
}

}  // namespace pinflow::detail
