#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"
#include "src/device/backend.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/sanitized.hpp"

using namespace pinflow;

namespace {

template <typename Value>
std::vector<Value> copied(const device_buffer& from, std::size_t count, const stream& stream) {
    const pinned_buffer on_host(count * sizeof(Value), stream.device());
    copy_to_host_async(on_host.bytes(), from.data(), stream);
    stream.synchronize();
    const auto* const values = reinterpret_cast<const Value*>(on_host.data());
    return {values, values + count};
}

/// Sorts indices with the device's backend.
struct sorted_on_device {
    sorted_on_device(const device& device, const std::vector<std::uint64_t>& ids, std::uint64_t row_count,
                     bool is_checked, detail::sort_kernels kernels) {
        const stream stream(device);
        const std::uint64_t scratch_bytes =
            device.backend().sort_scratch_bytes(ids.size(), row_count, kernels);
        const device_buffer unsorted(ids.size() * sizeof(std::uint64_t), stream);
        const device_buffer sorted(ids.size() * sizeof(std::uint64_t), stream);
        const device_buffer numbers(ids.size() * sizeof(std::uint32_t), stream);
        const device_buffer scratch(scratch_bytes, stream);
        const device_buffer counting(sizeof(detail::error_count), stream);
        const device_buffer on_device(sizeof(detail::index_errors), stream);
        const pinned_buffer on_host(sizeof(detail::index_errors), device);
        auto* const reported = new (on_host.data()) detail::index_errors;
        device.backend().fill_zero(counting.data(), counting.size_bytes(), stream.view().native_handle());
        copy_to_device_async(unsorted.data(), std::as_bytes(std::span(ids)), stream);
        detail::row_sort sort;
        sort.ids = reinterpret_cast<const std::uint64_t*>(unsorted.data());
        sort.count = ids.size();
        sort.row_count = row_count;
        sort.sorted_ids = reinterpret_cast<std::uint64_t*>(sorted.data());
        sort.positions = reinterpret_cast<std::uint32_t*>(numbers.data());
        sort.scratch = scratch.data();
        sort.scratch_bytes = scratch_bytes;
        sort.kernels = kernels;
        if (is_checked) {
            sort.errors = {reinterpret_cast<detail::index_errors*>(on_device.data()), reported,
                           reinterpret_cast<detail::error_count*>(counting.data())};
        }
        device.backend().prepare_rows();
        device.backend().sort_rows(sort, stream.view().native_handle());
        sorted_ids = copied<std::uint64_t>(sorted, ids.size(), stream);
        positions = copied<std::uint32_t>(numbers, ids.size(), stream);
        report = *reported;
        if (is_checked) found = copied<detail::index_errors>(on_device, 1, stream)[0];
        left_counting = copied<detail::error_count>(counting, 1, stream)[0];
    }

    std::vector<std::uint64_t> sorted_ids;
    std::vector<std::uint32_t> positions;
    detail::index_errors report;
    detail::index_errors found;
    detail::error_count left_counting;
};

std::vector<std::uint64_t> random_ids(std::size_t count, std::uint64_t below, std::mt19937_64& random) {
    std::vector<std::uint64_t> ids(count);
    for (std::uint64_t& id : ids)
        id = random() % below;
    return ids;
}

/// The host sorts in one way.
std::vector<detail::sort_kernels> choices_of(const device& device) {
    if (device.kind() == device_kind::host) return {detail::sort_kernels::one};
    return {detail::sort_kernels::one, detail::sort_kernels::several};
}

/// The lengths of lists at which the sorts of a device differ: a tile, several blocks, the longest list that
/// one kernel sorts, longer ones.
constexpr std::size_t counts[] = {1, 2, 31, 33, 4096, 4097, 70000, 131072, 262144, 262145};

}  // namespace

TEST_CASE("sort_rows: indices are in order with their positions, and equal ones in the order of positions") {
    on_each_device([](const device& device) {
        std::mt19937_64 random(70);
        for (const std::size_t count : counts) {
            if (sanitized && count > 131072) continue;
            for (const std::uint64_t row_count :
                 {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{256}, std::uint64_t{257},
                  std::uint64_t{1} << 21, (std::uint64_t{1} << 40) + 1, ~std::uint64_t{0}}) {
                CAPTURE(count);
                CAPTURE(row_count);
                const std::vector<std::uint64_t> ids = random_ids(count, row_count, random);
                std::vector<std::uint32_t> order(count);
                std::iota(order.begin(), order.end(), 0U);
                std::ranges::sort(order, {}, [&](std::uint32_t at) { return std::pair(ids[at], at); });
                for (const detail::sort_kernels kernels : choices_of(device)) {
                    for (const bool is_checked : {false, true}) {
                        const sorted_on_device sorted(device, ids, row_count, is_checked, kernels);
                        CHECK(sorted.positions == order);
                        CHECK(std::ranges::equal(sorted.sorted_ids, order, {}, {},
                                                 [&](std::uint32_t at) { return ids[at]; }));
                        CHECK(sorted.report.outside_count == 0);
                        CHECK(sorted.found.outside_count == 0);
                    }
                }
            }
        }
    });
}

TEST_CASE("sort_rows: indices outside the table are counted, and the first of them is reported") {
    on_each_device([](const device& device) {
        std::mt19937_64 random(71);
        constexpr std::uint64_t row_count = 1000;
        for (const std::size_t count : counts) {
            CAPTURE(count);
            std::vector<std::uint64_t> ids = random_ids(count, row_count, random);
            const std::size_t first = count / 2;
            ids[first] = row_count;
            ids[count - 1] = ~std::uint64_t{0};
            const std::uint64_t wrong = first == count - 1 ? 1 : 2;
            for (const detail::sort_kernels kernels : choices_of(device)) {
                const sorted_on_device sorted(device, ids, row_count, true, kernels);
                for (const detail::index_errors& errors : {sorted.report, sorted.found}) {
                    CHECK(errors.outside_count == wrong);
                    CHECK(errors.outside_position == first);
                    CHECK(errors.outside_id == ids[first]);
                    CHECK(errors.repeated_count == 0);
                }
                CHECK(sorted.left_counting.count == 0);
                CHECK(sorted.left_counting.complement == 0);
            }
        }
    });
}
