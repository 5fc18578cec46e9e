#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/enumerators.hpp"
#include "src/device/backend.hpp"
#include "src/rows/exchange_checks.hpp"

namespace pinflow::detail {

namespace {

/// Refuses batches that overlap the table: the order of reads and writes would be undefined.
void check_apart(const row_table& table, const call_request& request) {
    const bool is_gather = request.direction == row_direction::gather;
    const auto table_begin = reinterpret_cast<std::uintptr_t>(table.data());
    const std::uintptr_t table_end = table_begin + table.size_bytes();
    for (const row_batch& each : request.batches) {
        const auto begin = reinterpret_cast<std::uintptr_t>(each.rows);
        const std::uint64_t end = saturated(each.ids.size(), table.row_size_bytes(), begin);
        if (begin == end || begin >= table_end || end <= table_begin) continue;
        throw invalid_argument(fmt::format(
            "cannot {} {} rows of {} bytes {} address {:#x}: they overlap {}, which lies from {:#x} to {:#x}",
            is_gather ? "gather" : "scatter", each.ids.size(), table.row_size_bytes(),
            is_gather ? "to" : "from", begin, table.description(), table_begin, table_end));
    }
}

/// Refuses gathers that would overwrite their own indices, which may be read while rows are written.
void check_apart(const row_batch& batch, std::uint64_t row_size_bytes) {
    if (!batch.ids.on_device() || row_size_bytes == 0) return;
    const std::uint64_t count = batch.ids.size();
    const auto ids = reinterpret_cast<std::uintptr_t>(batch.ids.data());
    const auto rows = reinterpret_cast<std::uintptr_t>(batch.rows);
    const std::uint64_t ids_end = saturated(count, sizeof(std::uint64_t), ids);
    const std::uint64_t rows_end = saturated(count, row_size_bytes, rows);
    if (ids >= rows_end || rows >= ids_end) return;
    throw invalid_argument(fmt::format(
        "cannot gather {} rows of {} bytes to address {:#x}: they overlap their indices in device "
        "memory, which lie from {:#x} to {:#x}",
        count, row_size_bytes, rows, ids, ids_end));
}

/// Refuses sums of elements that cannot be added up, or that are not aligned.
void check_sums(const row_table& table, std::span<const row_batch> batches) {
    static_cast<void>(sum_type_of(table.element()));
    const std::uint64_t element = table.element().size_bytes();
    const auto check = [&](std::string_view what, std::uint64_t number) {
        if (number % element == 0) return;
        throw unsupported(
            fmt::format("cannot add up rows of {}: {} {:#x} is not a multiple of {}, the size of an element",
                        table.description(), what, number, element));
    };
    check("the address", reinterpret_cast<std::uintptr_t>(table.data()));
    check("the row size", table.row_size_bytes());
    for (std::size_t i = 0; i < batches.size(); ++i) {
        if (batches[i].ids.size() > 0)
            check(fmt::format("the address of batch {},", i),
                  reinterpret_cast<std::uintptr_t>(batches[i].rows));
    }
}

}  // namespace

sum_type sum_type_of(const dtype& type) {
    if (!type.is_little_endian()) {
        throw unsupported(fmt::format("cannot add up rows of {}: only little-endian elements can be added up",
                                      type.descr()));
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
        "cannot add up rows of {}: only floats and integers of 4 and 8 bytes, float16 and bfloat16 can be "
        "added up",
        type.descr()));
}

void check_request(const exchange_setup& setup, const call_request& request) {
    const row_table& table = setup.table;
    const bool is_gather = request.direction == row_direction::gather;
    bool ids_on_device = false;
    for (const row_batch& each : request.batches) {
        const std::uint64_t count = each.ids.size();
        ids_on_device = ids_on_device || (count > 0 && each.ids.on_device());
        if (count > 0 && each.ids.data() == nullptr) {
            throw invalid_argument(fmt::format("{} indices cannot lie at a null pointer", count));
        }
        if (count > 0 && table.row_size_bytes() > 0 && each.rows == nullptr) {
            throw invalid_argument(fmt::format("{} rows of {} bytes cannot be {} a null pointer", count,
                                               table.row_size_bytes(),
                                               is_gather ? "gathered to" : "scattered from"));
        }
        if (is_gather) check_apart(each, table.row_size_bytes());
    }
    check_apart(table, request);
    if (request.stream.device() != setup.device) {
        throw invalid_argument(fmt::format("cannot exchange rows with {} on a stream of {}",
                                           setup.device.name(), request.stream.device().name()));
    }
    if (setup.device.backend().is_capturing(request.stream.native_handle())) {
        throw unsupported(
            "cannot exchange rows on a stream that is being captured into a CUDA graph: a call uses its "
            "memory once, and a graph is launched again and again. Make the call before the capture begins "
            "or after it has ended");
    }
    if (setup.options.route == row_route::copy && ids_on_device) {
        throw unsupported(
            "with the route set to copy, indices must be in host memory; set direct or automatic");
    }
    if (is_gather) return;
    check_enumerator(request.policy, duplicate_policy::error, "duplicate_policy");
    if (!table.writable()) {
        throw unsupported(
            fmt::format("cannot scatter rows to {}: a row_table of a row_source is read-only. Make it of a "
                        "writable span instead",
                        table.description()));
    }
    if (setup.options.route == row_route::copy && request.policy != duplicate_policy::last) {
        throw unsupported("the route copy supports only duplicate_policy::last");
    }
    if (request.policy == duplicate_policy::sum) check_sums(table, request.batches);
}

void check_ids(const row_table& table, std::span<const row_call> calls) {
    std::uint64_t outside_count = 0;
    std::uint64_t count = 0;
    std::uint64_t unchecked_count = 0;
    for (const row_call& call : calls) {
        outside_count += call.outside_count();
        for (const row_batch& each : call.request().batches)
            (each.ids.on_device() ? unchecked_count : count) += each.ids.size();
    }
    if (outside_count == 0) return;
    std::uint64_t position = 0;
    for (const row_call& call : calls) {
        const std::uint64_t* ids = call.host_ids();
        for (const row_batch& each : call.request().batches) {
            const std::uint64_t first = position;
            position += each.ids.size();
            if (each.ids.on_device()) continue;
            const std::span own(ids, each.ids.size());
            ids += own.size();
            const auto wrong =
                std::ranges::find_if(own, [&](std::uint64_t id) { return id >= table.row_count(); });
            if (wrong == own.end()) continue;
            const std::string what = fmt::format(
                "cannot {} rows of {}", call.is_gather() ? "gather" : "scatter", table.description());
            throw invalid_argument(outside_sentence(what, outside_count, count, table.row_count(), *wrong,
                                                    first + static_cast<std::uint64_t>(wrong - own.begin()),
                                                    unchecked_count));
        }
    }
}

}  // namespace pinflow::detail
