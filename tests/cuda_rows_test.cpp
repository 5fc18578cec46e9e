#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/rows.hpp"
#include "src/device/backend.hpp"
#include "src/device/cuda/api.hpp"
#include "src/device/cuda/sort_rows.hpp"
#include "src/device/pin_registry.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_tables.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;

namespace {

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

/// Memory that CUDA does not know, filled with random bytes.
struct plain_table {
    explicit plain_table(std::uint64_t size_bytes)
        : memory(std::make_shared<memory_region>(memory_region::anonymous(size_bytes))) {
        std::mt19937_64 random(size_bytes);
        content = random_bytes(size_bytes, random);
        std::ranges::copy(content, memory->data());
    }
    row_table table(std::uint64_t row_bytes) const {
        return {memory->bytes(), row_bytes, dtype::of<std::byte>(), memory};
    }

    std::shared_ptr<memory_region> memory;
    std::vector<std::byte> content;
};

/// Whether this exchange gathers random rows unchanged and scatters them back.
bool rows_are_right(row_exchange& exchange, const std::vector<std::byte>& content, id_place place) {
    const device gpu = exchange.device();
    std::mt19937_64 random(60);
    const std::uint64_t row_bytes = exchange.table().row_size_bytes();
    const id_list ids(gpu, make_ids(id_order::random, 300, exchange.table().row_count(), random), place);
    std::mt19937_64 again(60);
    const guarded_rows rows(gpu, 300 * row_bytes, 3);
    exchange.gather(ids.get(), rows.data());
    const id_vector numbers = make_ids(id_order::random, 300, exchange.table().row_count(), again);
    if (!rows.holds(gathered(content, row_bytes, numbers)) || !rows.sentinels_left()) return false;
    if (!exchange.table().writable()) return true;
    exchange.scatter(ids.get(), rows.data());
    return std::ranges::equal(std::span(exchange.table().data(), content.size()), content);
}

}  // namespace

TEST_CASE("cuda rows: an exchange page-locks plain memory for as long as it lives") {
    const device gpu = device::cuda(0);
    const plain_table plain(4 * mebibyte);
    const auto registered = [&] {
        cudaPointerAttributes attributes{};
        const auto status = ::cudaPointerGetAttributes(&attributes, plain.memory->data());
        return status == cudaSuccess && attributes.type == cudaMemoryTypeHost;
    };
    CHECK_FALSE(registered());
    for (const row_route route :
         {row_route::automatic, row_route::direct, row_route::copy, row_route::hybrid}) {
        row_exchange exchange(plain.table(512), gpu, {.route = route});
        CHECK(registered());
        CHECK(rows_are_right(exchange, plain.content, id_place::host));
    }
    CHECK_FALSE(registered());
    row_exchange staged(plain.table(512), gpu, {.route = row_route::staged});
    CHECK_FALSE(registered());
    CHECK(rows_are_right(staged, plain.content, id_place::device));
}

TEST_CASE("cuda rows: rows across the edges of registered pieces are moved whole") {
    const device gpu = device::cuda(0);
    constexpr std::uint64_t row_bytes = 3 * mebibyte + 4;
    constexpr std::uint64_t row_count = sanitized ? 12 : 45;
    const plain_table plain(row_bytes * row_count);
    const pinned_pages pages({{plain.memory->bytes(), "a table", plain.memory}}, gpu,
                             {.budget_bytes = generous_pin_budget, .piece_bytes = 8 * mebibyte});
    pages.require();
    std::mt19937_64 random(61);
    for (const row_route route : every_route) {
        INFO("route " << to_string(route));
        row_exchange exchange(plain.table(row_bytes), gpu, {.route = route});
        id_vector ids(row_count);
        std::iota(ids.begin(), ids.end(), 0);
        std::ranges::shuffle(ids, random);
        const guarded_rows rows(gpu, row_bytes * row_count, 1);
        exchange.gather(ids_of(ids), rows.data());
        CHECK(rows.holds(gathered(plain.content, row_bytes, ids)));
        CHECK(rows.sentinels_left());
        std::ranges::fill(plain.memory->bytes(), std::byte{0});
        exchange.scatter(ids_of(ids), rows.data());
        CHECK(std::ranges::equal(plain.memory->bytes(), plain.content));
    }
}

TEST_CASE("cuda rows: if page-locking fails, the staged route remains, and the reason is given") {
    const device gpu = device::cuda(0);
    const temporary_folder folder;
    write_random_rows(folder / "rows.npy", 1000, 50, 62);
    const array file = open_npy(folder / "rows.npy");
    const std::vector<std::byte> of_file(file.view().data(), file.view().data() + file.size_bytes());
    const plain_table plain(mebibyte);
    const auto refuse = [&](auto table, const std::vector<std::byte>& content) {
        std::optional<row_exchange> exchange;
        {
            const detail::cuda::scoped_failure_hook hook([](std::string_view call) {
                return call == "cudaHostRegister" ? cudaErrorMemoryAllocation : cudaSuccess;
            });
            for (const row_route route : {row_route::direct, row_route::copy, row_route::hybrid}) {
                const std::string reason =
                    message_of<unsupported>([&] { row_exchange(table(), gpu, {.route = route}); });
                CHECK(contains(reason, "the route " + std::string(to_string(route)) + " cannot be taken"));
                CHECK(contains(reason, "cudaErrorMemoryAllocation"));
            }
            exchange.emplace(table(), gpu);
        }
        const row_plan plan = exchange->plan_gather(1000);
        CHECK(plan.route == row_route::staged);
        CHECK(contains(plan.reason, "is not page-locked"));
        for (const id_place place : every_id_place)
            CHECK(rows_are_right(*exchange, content, place));
    };
    refuse([&] { return plain.table(64); }, plain.content);
    refuse([&] { return row_table(file.rows()); }, of_file);
}

TEST_CASE("cuda rows: a table that is larger than the pin budget is not page-locked") {
    const device gpu = device::cuda(0);
    const plain_table plain(4 * mebibyte);
    row_exchange small(plain.table(64), gpu, {.pin_budget_bytes = mebibyte});
    CHECK(small.plan_gather(1000).route == row_route::staged);
    CHECK(contains(small.plan_gather(1000).reason, "the pin budget that was set"));
    CHECK(rows_are_right(small, plain.content, id_place::host));
    row_exchange large(plain.table(64), gpu, {.pin_budget_bytes = generous_pin_budget});
    CHECK_FALSE(contains(large.plan_gather(1000).reason, "pin budget"));
}

TEST_CASE("cuda rows: the pages of a file stay locked after their first owner is gone") {
    const device gpu = device::cuda(0);
    const temporary_folder folder;
    write_random_rows(folder / "rows.npy", 20'000, 64, 63);
    const array file = open_npy(folder / "rows.npy");
    const std::vector<std::byte> content(file.view().data(), file.view().data() + file.size_bytes());
    std::optional<pinned_pages> pages(std::in_place, pin_ranges(file.rows()), gpu,
                                      pin_options{.budget_bytes = generous_pin_budget});
    pages->require();
    row_exchange exchange(row_table(file.rows()), gpu, {.route = row_route::direct});
    pages.reset();
    for (const id_place place : every_id_place)
        CHECK(rows_are_right(exchange, content, place));
}

TEST_CASE(
    "cuda rows: memory stays locked for each of its exchanges, whichever owner locked its pages first") {
    const device gpu = device::cuda(0);
    const plain_table plain(4 * mebibyte);
    std::optional<row_exchange> first(std::in_place, plain.table(64), gpu,
                                      row_exchange_options{.route = row_route::direct});
    row_exchange second(plain.table(64), gpu, {.route = row_route::direct});
    // a table of which another owner holds a part
    const plain_table partly(4 * mebibyte);
    std::optional<pinned_pages> pages(
        std::in_place,
        std::vector<pin_range>{{partly.memory->bytes().first(mebibyte), "a part", partly.memory}}, gpu,
        pin_options{.budget_bytes = generous_pin_budget});
    pages->require();
    row_exchange whole(partly.table(64), gpu, {.route = row_route::direct});
    first.reset();
    pages.reset();
    for (const id_place place : every_id_place) {
        CHECK(rows_are_right(second, plain.content, place));
        CHECK(rows_are_right(whole, partly.content, place));
    }
}

TEST_CASE("cuda rows: the default streams carry rows, legacy and per-thread") {
    const device gpu = device::cuda(0);
    REQUIRE(::cudaSetDevice(0) == cudaSuccess);
    std::mt19937_64 random(64);
    const auto content = random_bytes(1000 * 48, random);
    const guarded_table table(gpu, content);
    const id_vector ids = make_ids(id_order::random, 700, 1000, random);
    for (const row_route route : every_route) {
        INFO("route " << to_string(route));
        row_exchange exchange(row_table(table.bytes(), 48), gpu, {.route = route});
        for (const cudaStream_t handle :
             {static_cast<cudaStream_t>(nullptr), cudaStreamLegacy, cudaStreamPerThread}) {
            const stream_view stream = from_cuda(handle, 0);
            const guarded_rows rows(gpu, ids.size() * 48);
            exchange.gather_async(ids_of(ids), rows.data(), stream);
            exchange.scatter_async(ids_of(ids), rows.data(), duplicate_policy::last, stream);
            stream.synchronize();
            CHECK(rows.holds(gathered(content, 48, ids)));
            CHECK(table.holds(content));
        }
    }
}

TEST_CASE("cuda rows: millions of rows are sorted, gathered, repeated and scattered") {
    const device gpu = device::cuda(0);
    std::mt19937_64 random(65);
    for (const std::uint64_t row_bytes : {16U, 13U}) {
        constexpr std::uint64_t row_count = sanitized ? 50'000 : 1'000'000;
        constexpr std::size_t count = 3 * row_count;
        const auto before = random_bytes(row_count * row_bytes, random);
        const guarded_table table(gpu, before);
        const id_vector ids = make_ids(id_order::random, count, row_count, random);
        const auto content = random_bytes(count * row_bytes, random);
        for (const row_route route :
             {row_route::automatic, row_route::direct, row_route::staged, row_route::hybrid}) {
            INFO("route " << to_string(route) << ", rows of " << row_bytes << " bytes");
            for (const id_place place : {id_place::host, id_place::device}) {
                std::ranges::copy(before, table.bytes().begin());
                row_exchange exchange(row_table(table.bytes(), row_bytes), gpu, {.route = route});
                const id_list list(gpu, ids, place);
                const guarded_rows rows(gpu, content);
                exchange.scatter(list.get(), rows.data());
                const auto after = scattered(before, row_bytes, ids, content);
                CHECK(table.holds(after));
                exchange.gather(list.get(), rows.data());
                CHECK(rows.holds(gathered(after, row_bytes, ids)));
                CHECK(rows.sentinels_left());
                CHECK(table.sentinels_left());
            }
        }
    }
}

TEST_CASE("cuda rows: an even number of blocks gathers aligned rows in pairs if the device has clusters") {
    const device gpu = device::cuda(0);
    int has_clusters = 0;
    REQUIRE(detail::cuda::device_attribute(has_clusters, cudaDevAttrClusterLaunch, 0) == cudaSuccess);
    const guarded_table table(gpu, std::uint64_t{1} << 20);
    const auto launched_in_pairs = [&](std::uint64_t row_bytes, std::size_t count, unsigned blocks,
                                       std::size_t misalignment = 0) {
        const id_vector ids(count, 1);
        row_exchange exchange(row_table(table.bytes(), row_bytes), gpu,
                              {.route = row_route::direct, .blocks = blocks});
        const guarded_rows rows(gpu, ids.size() * row_bytes, misalignment);
        std::atomic<int> calls = 0;
        const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
            if (call == "cudaLaunchKernelExC") ++calls;
            return cudaSuccess;
        });
        exchange.gather(ids_of(ids), rows.data());
        return calls.load();
    };
    for (const std::uint64_t row_bytes : {64U, 4096U}) {
        CHECK(launched_in_pairs(row_bytes, 10'000, 0) == has_clusters);
        CHECK(launched_in_pairs(row_bytes, 10'000, 2) == has_clusters);
        CHECK(launched_in_pairs(row_bytes, 10'000, 3) == 0);
        CHECK(launched_in_pairs(row_bytes, 10'000, 0, 8) == 0);
    }
    // an even number is asked for, but there is work for three blocks, each of 224 rows
    CHECK(launched_in_pairs(64, 600, 4) == 0);
    CHECK(launched_in_pairs(64, 600, 2) == has_clusters);
}

TEST_CASE(
    "cuda rows: if CUDA refuses a call half-way, the exchange still works, and a refused launch is an "
    "error") {
    const device gpu = device::cuda(0);
    std::mt19937_64 random(66);
    const id_vector ids = make_ids(id_order::random, 300, 500, random);
    const auto refuse = [&](row_route route, std::uint64_t row_bytes) {
        const auto content = random_bytes(500 * row_bytes, random);
        const auto expected = gathered(content, row_bytes, ids);
        const guarded_table table(gpu, content);
        row_exchange exchange(row_table(table.bytes(), row_bytes), gpu,
                              {.route = route, .staging_bytes = 2000});
        const guarded_rows rows(gpu, expected);
        exchange.gather(ids_of(ids), rows.data());  // makes everything that is made once
        exchange.scatter(ids_of(ids), rows.data());
        /// Makes a CUDA call fail. @return whether the exchange made the call, and whether it threw.
        const auto attempt = [&](std::string_view refused, int when, bool gathers) {
            const guarded_rows destination(gpu, expected.size());
            std::atomic<int> calls = 0;
            bool thrown = false;
            try {
                const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
                    return call == refused && ++calls == when ? cudaErrorMemoryAllocation : cudaSuccess;
                });
                if (gathers)
                    exchange.gather(ids_of(ids), destination.data());
                else
                    exchange.scatter(ids_of(ids), rows.data());
            } catch (const device_error&) {
                thrown = true;
            }
            return std::pair(calls >= when, thrown);
        };
        for (const std::string_view refused :
             {"cudaMallocFromPoolAsync", "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync",
              "cudaMemcpyBatchAsync", "cudaEventRecord", "cudaLaunchHostFunc", "cuStreamWaitValue32"}) {
            for (const bool gathers : {true, false}) {
                for (int when = 1; when < 30; ++when) {
                    INFO(refused << ", call " << when);
                    CAPTURE(gathers);
                    const auto [met, thrown] = attempt(refused, when, gathers);
                    if (refused.starts_with("cudaLaunchKernel")) CHECK(thrown == met);
                    CHECK(table.holds(content));
                    const guarded_rows after(gpu, expected.size());
                    exchange.gather(ids_of(ids), after.data());
                    CHECK(after.holds(expected));
                    // no such call was left, or its failure was no error: later ones are not tried
                    if (!met || !thrown) break;
                }
            }
        }
        exchange.check();
    };
    for (const row_route route : every_route) {
        for (const std::uint64_t row_bytes : {40U, 48U}) {  // not aligned, and aligned
            INFO("route " << to_string(route) << ", rows of " << row_bytes << " bytes");
            refuse(route, row_bytes);
        }
    }
}

TEST_CASE("cuda rows: the sort by one kernel is right with any number of blocks") {
    const device gpu = device::cuda(0);
    gpu.backend().prepare_rows();
    const stream stream(gpu);
    void* const native = stream.view().native_handle();
    std::mt19937_64 random(61);
    constexpr std::uint32_t count = 50000;  // 13 tiles
    constexpr std::uint64_t row_count = 30000;
    const id_vector ids = make_ids(id_order::random, count, row_count, random);
    std::vector<std::uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0U);
    std::ranges::sort(order, {}, [&](std::uint32_t at) { return std::pair(ids[at], at); });
    for (const unsigned blocks : {1U, 3U, 7U, 16U}) {
        CAPTURE(blocks);
        const device_buffer lists(count * 3 * sizeof(std::uint64_t), stream);
        const device_buffer positions(count * 2 * sizeof(std::uint32_t), stream);
        const device_buffer counts(blocks * detail::cuda::sort_digits * sizeof(std::uint32_t), stream);
        auto* const unsorted = reinterpret_cast<std::uint64_t*>(lists.data());
        copy_to_device_async(lists.data(), std::as_bytes(std::span(ids)), stream);
        detail::cuda::sort_launch work;
        work.sort.ids = unsorted;
        work.sort.count = count;
        work.sort.row_count = row_count;
        work.sort.sorted_ids = unsorted + count;
        work.sort.positions = reinterpret_cast<std::uint32_t*>(positions.data());
        work.bits = 15;
        work.other_ids = unsorted + 2 * count;
        work.other_positions = work.sort.positions + count;
        work.digit_counts = reinterpret_cast<std::uint32_t*>(counts.data());
        void* arguments[] = {&work};
        REQUIRE(detail::cuda::launch_together(detail::cuda::sort_rows(), blocks, detail::cuda::sort_threads,
                                              arguments, static_cast<cudaStream_t>(native)) == cudaSuccess);
        std::vector<std::uint32_t> found(count);
        copy_to_host_async(std::as_writable_bytes(std::span(found)), positions.data(), stream);
        stream.synchronize();
        CHECK(found == order);
    }
}
