#include <doctest/doctest.h>
#include <sys/mman.h>

#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/rows.hpp"
#include "tests/measured_backend.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_tables.hpp"

// Plans of calls without a measurement.

using namespace pinflow;

namespace {

constexpr std::uint64_t row_bytes = 64;
constexpr std::uint64_t table_bytes = std::uint64_t{1} << 20;
/// So little that the staging buffers are smaller than min_staging_bytes of the thresholds.
constexpr std::uint64_t tiny_staging_bytes = 64 << 10;

row_table table_of(const guarded_table& table, std::uint64_t size_bytes = row_bytes) {
    return {table.bytes(), size_bytes};
}

}  // namespace

TEST_CASE("planner: a forced route uses the blocks and the staged share that were set") {
    on_each_device([](const device& device) {
        const guarded_table table(device, table_bytes);
        const auto planned = [&](const row_exchange_options& options, bool is_scatter = false) {
            const row_exchange exchange(table_of(table), device, options);
            return is_scatter ? exchange.plan_scatter(10) : exchange.plan_gather(10);
        };
        CHECK_THROWS_AS(planned({.route = static_cast<row_route>(99)}), invalid_argument);
        row_plan plan = planned({.route = row_route::hybrid});
        CHECK(plan.route == row_route::hybrid);
        CHECK(plan.staged_share == 0.4);
        CHECK(plan.blocks > 0);
        CHECK(plan.reason == "requested in the options");
        plan = planned({.route = row_route::hybrid, .blocks = 9, .staged_share = 0.125});
        CHECK(plan.staged_share == 0.125);
        CHECK(plan.blocks == 9);
        CHECK(contains_all(plan.reason, {"requested in the options", "9 thread blocks, as set",
                                         "0.125 of the rows staged, as set"}));
        for (const bool is_scatter : {false, true}) {
            plan = planned({.route = row_route::direct, .blocks = 9, .staged_share = 0.5}, is_scatter);
            CHECK(plan.blocks == 9);
            CHECK(plan.staged_share == 0);
            CHECK(contains_all(plan.reason, {"requested in the options", "9 thread blocks, as set"}));
            CHECK_FALSE(contains(plan.reason, "staged"));
            plan = planned({.route = row_route::staged, .blocks = 9, .staged_share = 0.5}, is_scatter);
            CHECK(plan.blocks == 0);
            CHECK(plan.staged_share == 0);
            CHECK(plan.reason == "requested in the options");
        }
    });
}

TEST_CASE("planner: direct scatters and hybrid gathers are sorted, direct gathers only below 4 KiB a row") {
    measured_backend backend;
    std::mt19937_64 random(12);
    const auto content = random_bytes(std::size_t{4096} * 4080, random);
    const guarded_table table(device::host(), content);
    const id_vector ids{3, 1, 3};
    const auto sorts = [&](row_route route, std::uint64_t row_size_bytes, bool is_scatter) {
        const guarded_rows rows(device::host(), gathered(content, row_size_bytes, ids));
        row_exchange exchange(row_table(table.bytes(), row_size_bytes), backend.device(), {.route = route});
        backend.sorts = 0;
        if (is_scatter) {
            exchange.scatter(ids_of(ids), rows.data());
        } else {
            exchange.gather(ids_of(ids), rows.data());
        }
        CHECK(rows.holds(gathered(content, row_size_bytes, ids)));
        CHECK(table.holds(content));
        return backend.sorts != 0;
    };
    CHECK(sorts(row_route::direct, 4080, false));
    CHECK_FALSE(sorts(row_route::direct, 4096, false));
    for (const std::uint64_t row_size_bytes : {4080U, 4096U}) {
        CHECK(sorts(row_route::direct, row_size_bytes, true));
        CHECK(sorts(row_route::hybrid, row_size_bytes, false));
    }
}

TEST_CASE("planner: few thread blocks move rows, and more if there is much work for each byte") {
    const auto planned = [](std::span<std::byte> rows, std::uint64_t row_size_bytes, bool is_scatter) {
        const row_exchange exchange(row_table(rows, row_size_bytes), device::host(),
                                    {.route = row_route::direct});
        return (is_scatter ? exchange.plan_scatter(10) : exchange.plan_gather(10)).blocks;
    };
    const guarded_table table(device::host(), table_bytes);
    const guarded_table misaligned(device::host(), table_bytes, 4);
    constexpr std::uint64_t large_bytes = std::uint64_t{9} << 30;  // of addresses, which nobody touches
    void* const addresses =
        ::mmap(nullptr, large_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(addresses != MAP_FAILED);
    const memory_region large(
        static_cast<std::byte*>(addresses), large_bytes,
        [](std::byte* data, std::uint64_t size_bytes, void*) noexcept { ::munmap(data, size_bytes); });
    const std::span large_rows = large.bytes();
    const unsigned few = planned(table.bytes(), row_bytes, false);
    CHECK(few > 0);
    CHECK(few < 32);
    CHECK(planned(table.bytes(), row_bytes, true) == few);
    CHECK(planned(large_rows, row_bytes, false) == few);
    CHECK(planned(large_rows, row_bytes, true) > few);
    for (const std::span rows : {table.bytes(), large_rows}) {
        // more would take the link from a gather that runs at the same time
        CHECK(planned(rows, 2048, true) == few - 1);
        CHECK(planned(rows, 4096, true) == few - 1);
        CHECK(planned(rows, 2048, false) == few);
        CHECK(planned(rows, 4096, false) == few / 2);
    }
    for (const bool is_scatter : {false, true}) {
        CHECK(planned(table.bytes(), 128, is_scatter) == few);
        CHECK(planned(table.bytes(), 8, is_scatter) == 32);
        CHECK(planned(misaligned.bytes(), row_bytes, is_scatter) == 32);
        CHECK(planned(misaligned.bytes(), 8192, is_scatter) == few);
        CHECK(planned(large_rows, 8, is_scatter) == 16);
    }
}

TEST_CASE("planner: sums and batches that are not aligned take more thread blocks, unless those are set") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    const id_vector ids{3, 1, 3};
    const auto blocks_of = [&](row_exchange_options options, duplicate_policy policy,
                               std::size_t misalignment = 0) {
        const guarded_rows rows(device::host(), ids.size() * row_bytes, misalignment);
        options.staging_bytes = tiny_staging_bytes;
        row_exchange exchange(row_table(table.bytes(), row_bytes, dtype::of<float>()), backend.device(),
                              options);
        backend.scatter_blocks.clear();
        exchange.scatter(ids_of(ids), rows.data(), policy);
        return backend.scatter_blocks;
    };
    using blocks = std::set<unsigned>;
    for (const row_route route : {row_route::direct, row_route::hybrid}) {
        CHECK_FALSE(blocks_of({.route = route}, duplicate_policy::last).contains(32));
        CHECK(blocks_of({.route = route}, duplicate_policy::sum).contains(32));
        CHECK(blocks_of({.route = route, .blocks = 5}, duplicate_policy::sum).contains(5));
        CHECK_FALSE(blocks_of({.route = route, .blocks = 5}, duplicate_policy::sum).contains(32));
        CHECK(blocks_of({.route = route}, duplicate_policy::last, 4).contains(32));
        CHECK(blocks_of({.route = route, .blocks = 5}, duplicate_policy::last, 4).contains(5));
    }
    const auto blocks_of_long_gather = [&](std::size_t misalignment) {
        const guarded_rows rows(device::host(), ids.size() * 4096, misalignment);
        row_exchange exchange(row_table(table.bytes(), 4096), backend.device(), {.route = row_route::direct});
        backend.blocks.clear();
        exchange.gather(ids_of(ids), rows.data());
        return backend.blocks;
    };
    CHECK(blocks_of_long_gather(0) == blocks{4});
    CHECK(blocks_of_long_gather(4) == blocks{8});
    // through staging buffers: 0, as many blocks as the work fills
    CHECK(blocks_of({.route = row_route::staged}, duplicate_policy::sum) == blocks{0});
}

TEST_CASE("planner: rows are moved right with any blocks and staged share") {
    on_each_device([](const device& device) {
        std::mt19937_64 random(11);
        const auto content = random_bytes(table_bytes, random);
        const guarded_table table(device, content);
        const id_vector ids = make_ids(id_order::random, 5000, table_bytes / row_bytes, random);
        for (const row_route route : {row_route::direct, row_route::hybrid}) {
            for (const double share : {0.0, 1e-9, 0.5, 0.999999}) {
                for (const unsigned blocks : {1U, 6U, 7U, std::numeric_limits<unsigned>::max()}) {
                    CAPTURE(share);
                    CAPTURE(blocks);
                    row_exchange exchange(
                        row_table(table.bytes(), row_bytes), device,
                        {.route = route, .staging_bytes = 1 << 20, .blocks = blocks, .staged_share = share});
                    const guarded_rows rows(device, ids.size() * row_bytes);
                    exchange.gather(ids_of(ids), rows.data());
                    CHECK(rows.holds(gathered(content, row_bytes, ids)));
                    exchange.scatter(ids_of(ids), rows.data());
                    CHECK(table.holds(content));
                }
            }
        }
    });
}

TEST_CASE("planner: a staged share below 0, or of 1 or more, is refused") {
    const guarded_table table(device::host(), table_bytes);
    for (const double share : {-0.1, 1.0, 2.0, std::numeric_limits<double>::quiet_NaN(),
                               std::numeric_limits<double>::infinity()}) {
        CAPTURE(share);
        try {
            const row_exchange exchange(row_table(table.bytes(), row_bytes), device::host(),
                                        {.route = row_route::hybrid, .staged_share = share});
            FAIL("was taken");
        } catch (const invalid_argument& failure) {
            CHECK(contains(failure.what(), "staged_share of a row_exchange must be at least 0 and below 1"));
        }
    }
}

TEST_CASE("planner: the hybrid route is taken in both directions") {
    on_each_device([](const device& device) {
        const guarded_table table(device, table_bytes);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device,
                              {.route = row_route::hybrid, .staged_share = 0.3});
        for (const row_plan& plan : {exchange.plan_gather(10), exchange.plan_scatter(10)}) {
            CHECK(plan.route == row_route::hybrid);
            CHECK(plan.sorted);
            CHECK(plan.staged_share == 0.3);
            CHECK(contains_all(plan.reason, {"requested in the options", "0.3 of the rows staged, as set"}));
            CHECK_FALSE(contains(plan.reason, "thread blocks"));
        }
    });
}

TEST_CASE("planner: rows are scattered by the plan's route and staged share") {
    measured_backend backend;
    std::mt19937_64 random(15);
    const guarded_table table(device::host(), table_bytes);
    const id_vector ids = make_ids(id_order::random, 1000, table_bytes / row_bytes, random);
    const guarded_rows rows(device::host(), ids.size() * row_bytes);
    const auto scatter = [&](row_route route) {
        backend.rows_scattered_directly = backend.rows_scattered_to_staging = 0;
        row_exchange exchange(row_table(table.bytes(), row_bytes), backend.device(),
                              {.route = route, .staged_share = route == row_route::hybrid ? 0.25 : 0});
        exchange.scatter(ids_of(ids), rows.data());
        return std::pair(backend.rows_scattered_directly, backend.rows_scattered_to_staging);
    };
    CHECK(scatter(row_route::direct) == std::pair<std::uint64_t, std::uint64_t>(1000, 0));
    CHECK(scatter(row_route::staged) == std::pair<std::uint64_t, std::uint64_t>(0, 1000));
    CHECK(scatter(row_route::hybrid) == std::pair<std::uint64_t, std::uint64_t>(750, 250));
}
