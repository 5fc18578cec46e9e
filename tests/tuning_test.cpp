#include "src/rows/tuning.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <future>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "tests/measured_backend.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_tables.hpp"
#include "tests/support/sanitized.hpp"

// Measurements of plans, on a device that is the host under another name.

using namespace pinflow;

namespace {

constexpr std::uint64_t row_bytes = 64;
constexpr std::uint64_t table_bytes = std::uint64_t{1} << 20;
/// So little that the staging buffers are smaller than min_staging_bytes of the thresholds.
constexpr std::uint64_t tiny_staging_bytes = 64 << 10;

row_table table_of(const guarded_table& table, std::uint64_t size_bytes = row_bytes) {
    return {table.bytes(), size_bytes};
}

/// Makes an exchange of rows of 64 bytes, and tunes it. @return whether that measured.
bool measures(measured_backend& backend, const row_exchange_options& options, std::size_t misalignment = 0,
              std::uint64_t count = 1000) {
    const guarded_table table(device::host(), table_bytes, misalignment);
    row_exchange exchange(table_of(table), backend.device(), options);
    const unsigned before = backend.gathers;
    exchange.tune(count);
    CHECK(contains(exchange.plan_gather(count).reason, "measured"));
    CHECK(contains(exchange.plan_scatter(count).reason, "measured"));
    return backend.gathers != before;
}

}  // namespace

TEST_CASE("tuning: measures once for exchanges that agree in all parameters that rates depend on") {
    measured_backend backend;
    const row_exchange_options usual{.threads = 2, .staging_bytes = std::uint64_t{1} << 20};
    CHECK(measures(backend, usual));
    CHECK_FALSE(measures(backend, usual));
    CHECK_FALSE(measures(backend, usual, 0, 1001));
    CHECK_FALSE(measures(backend, usual, 16));
    row_exchange_options other = usual;
    other.staging_bytes = std::uint64_t{16} << 20;  // other staging buffers
    CHECK(measures(backend, other));
    other.staging_bytes = std::uint64_t{64} << 20;  // buffers of the same size, but more of them
    CHECK(measures(backend, other));
    other = usual;
    other.threads = 1;
    CHECK(measures(backend, other));
    other = usual;
    other.blocks = 3;
    CHECK(measures(backend, other));
    other = usual;
    other.staged_share = 0.25;
    CHECK(measures(backend, other));
    CHECK_FALSE(measures(backend, other));
    CHECK(measures(backend, usual, 8));
    CHECK_FALSE(measures(backend, usual, 8));
    CHECK(measures(backend, usual, 0, 5000));
    const guarded_table table(device::host(), table_bytes);
    CHECK(row_exchange(table_of(table), device::host()).plan_gather(1000).gbps == 0);  // another device
}

TEST_CASE("tuning: no call measures, and neither does asking for a plan") {
    measured_backend backend;
    std::mt19937_64 random(3);
    const guarded_table table(device::host(), random_bytes(table_bytes, random));
    const stream stream(backend.device());
    row_exchange exchange(table_of(table), backend.device());
    for (const std::uint64_t count : {1U, 100U, 5000U}) {
        const guarded_rows rows(device::host(), count * row_bytes);
        const id_vector ids = make_ids(id_order::random, count, table_bytes / row_bytes, random);
        const unsigned before = backend.gathers;
        exchange.gather_async(ids_of(ids), rows.data(), stream);
        stream.synchronize();
        CHECK(backend.gathers == before + 1);
        exchange.scatter(ids_of(ids), rows.data());
        for (const row_plan& plan : {exchange.plan_gather(count), exchange.plan_scatter(count, 8)}) {
            CHECK(plan.reason.starts_with("not measured: "));
            CHECK(plan.gbps == 0);
            CHECK(plan.batches == 1);
        }
        CHECK(backend.gathers == before + 1);
    }
}

TEST_CASE("tuning: tuning leaves the table as it is, and does nothing where there is no choice") {
    measured_backend backend;
    std::mt19937_64 random(4);
    const auto content = random_bytes(table_bytes, random);
    const guarded_table table(device::host(), content);
    for (const row_route route : {row_route::direct, row_route::staged, row_route::hybrid}) {
        row_exchange exchange(table_of(table), backend.device(), {.route = route});
        exchange.tune(1000, 64);
        CHECK(exchange.plan_gather(1000).reason == "requested in the options");
    }
    CHECK(backend.gathers == 0);
    row_exchange on_host(table_of(table), device::host());
    on_host.tune(1000);
    CHECK(on_host.plan_gather(1000).gbps == 0);
    row_exchange empty(row_table(std::span<std::byte>(), row_bytes), backend.device());
    empty.tune(1000);
    CHECK(backend.gathers == 0);
    row_exchange exchange(table_of(table), backend.device());
    exchange.tune(1000);
    CHECK(backend.gathers > 0);
    CHECK(table.holds(content));
}

TEST_CASE("tuning: groups are tuned up to the number of batches asked for") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    row_exchange exchange(table_of(table), backend.device());
    exchange.tune(100, 6);
    for (const unsigned batches : {1U, 2U, 4U, 6U})
        CHECK(contains(exchange.plan_gather(100, batches).reason, "measured"));
    CHECK(exchange.plan_gather(100, 16).gbps == 0);
    const unsigned advised = exchange.plan_gather(100).batches;
    // rates are kept by the power of two of the row count: 6 batches (600 rows) and 8 (800 rows) share one
    CHECK((advised == 1 || advised == 2 || advised == 4 || advised == 8));
}

TEST_CASE("tuning: does not try staging buffers that staging_bytes leave too small") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    row_exchange exchange(table_of(table), backend.device(), {.staging_bytes = tiny_staging_bytes});
    exchange.tune(10'000);
    for (const row_plan& plan : {exchange.plan_gather(10'000), exchange.plan_scatter(10'000)}) {
        CHECK(plan.route == row_route::direct);
        CHECK(plan.gbps > 0);
        CHECK_FALSE(contains(plan.reason, "staged"));
        CHECK_FALSE(contains(plan.reason, "hybrid"));
        CHECK(contains(plan.reason, "leaves buffers of only 32768 bytes"));
    }
    CHECK(backend.staged_gathers == 0);
    row_exchange roomy(table_of(table), backend.device(), {.staging_bytes = 512 << 10});
    roomy.tune(10'000);
    const row_plan plan = roomy.plan_gather(10'000);
    CHECK(contains(plan.reason, "staged "));
    CHECK(contains(plan.reason, "hybrid sorted "));
    CHECK(contains(roomy.plan_scatter(10'000).reason, ", staged "));
    CHECK(backend.staged_gathers > 0);
}

TEST_CASE(
    "tuning: if memory is too short to measure, tune throws, and later calls use the plan of the fixed "
    "rules") {
    constexpr std::uint64_t count = 10'000;
    std::mt19937_64 random(7);
    const auto content = random_bytes(table_bytes, random);
    const id_vector ids = make_ids(id_order::random, count, table_bytes / row_bytes, random);
    enum class lacking { rows, staging, pinned_staging };
    for (const lacking lack : {lacking::rows, lacking::staging, lacking::pinned_staging}) {
        CAPTURE(static_cast<int>(lack));
        measured_backend backend;
        const guarded_table table(device::host(), content);
        const guarded_rows rows(device::host(), count * row_bytes);
        row_exchange exchange(table_of(table), backend.device());
        if (lack == lacking::rows) backend.max_allocated_bytes = count * row_bytes - 1;
        if (lack == lacking::staging) backend.max_allocated_bytes = std::uint64_t{1} << 20;
        if (lack == lacking::pinned_staging) backend.max_pinned_bytes = std::uint64_t{1} << 20;
        const std::string reason = message_of<device_error>([&] { exchange.tune(count); });
        CHECK(contains(reason, lack == lacking::pinned_staging ? "cannot be page-locked" : "no such memory"));
        CHECK(backend.refused == 1);
        exchange.gather(ids_of(ids), rows.data());
        CHECK(rows.holds(gathered(content, row_bytes, ids)));
        exchange.scatter(ids_of(ids), rows.data());
        CHECK(table.holds(content));
        for (const row_plan& plan : {exchange.plan_gather(count), exchange.plan_scatter(count)}) {
            CHECK(plan.route == row_route::direct);
            CHECK(plan.gbps == 0);
            CHECK(plan.reason.starts_with("not measured: "));
        }
        backend.max_allocated_bytes = backend.max_pinned_bytes = ~std::uint64_t{0};
        exchange.tune(count);  // nothing was remembered
        CHECK(contains(exchange.plan_gather(count).reason, "measured"));
    }
}

TEST_CASE("tuning: calls and plans do not wait for a measurement of their own exchange") {
    measured_backend backend;
    std::mt19937_64 random(6);
    const auto content = random_bytes(table_bytes, random);
    const guarded_table table(device::host(), content);
    row_exchange exchange(table_of(table), backend.device());
    gate reached;
    gate held;
    backend.before_allocating = [&, first = true]() mutable {
        if (!std::exchange(first, false)) return;
        reached.open();
        held.wait();
    };
    auto tuned = std::async(std::launch::async, [&] { exchange.tune(1000); });
    reached.wait();
    auto called = std::async(std::launch::async, [&] {
        const id_vector ids{3, 1, 3};
        const guarded_rows rows(device::host(), ids.size() * row_bytes);
        exchange.gather(ids_of(ids), rows.data());
        CHECK(rows.holds(gathered(content, row_bytes, ids)));
        return exchange.plan_gather(1000);
    });
    CHECK(called.wait_for(std::chrono::seconds(10)) == std::future_status::ready);
    held.open();
    CHECK(called.get().gbps == 0);
    tuned.get();
    CHECK(exchange.plan_gather(1000).gbps > 0);
}

TEST_CASE("tuning: simultaneous requests are measured once") {
    measured_backend once;
    CHECK(measures(once, {.threads = 1}));
    measured_backend backend;
    constexpr int askers = 4;
    std::barrier begin(askers);
    std::vector<std::future<row_plan>> plans;
    const guarded_table table(device::host(), table_bytes);
    for (int asker = 0; asker < askers; ++asker) {
        plans.push_back(std::async(std::launch::async, [&] {
            row_exchange exchange(table_of(table), backend.device(), {.threads = 1});
            begin.arrive_and_wait();
            exchange.tune(1000);
            return exchange.plan_gather(1000);
        }));
    }
    std::set<std::string> reasons;
    for (std::future<row_plan>& plan : plans)
        reasons.insert(plan.get().reason);
    CHECK(reasons.size() == 1);
    CHECK(backend.gathers == once.gathers);
}

TEST_CASE("tuning: a failed measurement is repeated at the next request") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    const row_exchange_options options{.staging_bytes = tiny_staging_bytes};
    row_exchange first(table_of(table), backend.device(), options);
    row_exchange next(table_of(table), backend.device(), options);
    gate reached;
    gate held;
    backend.before_allocating = [&, fails = true]() mutable {
        if (!std::exchange(fails, false)) return;
        reached.open();
        held.wait();
        throw fatal_device_error("the device is broken");
    };
    auto failed = std::async(std::launch::async, [&] { first.tune(1000); });
    reached.wait();
    auto measured = std::async(std::launch::async, [&] { next.tune(1000); });
    held.open();
    CHECK_THROWS_AS(failed.get(), fatal_device_error);
    measured.get();
    CHECK(first.plan_gather(1000).gbps > 0);
}

TEST_CASE("tuning: measures with a million rows at most, however small they are" *
          doctest::skip(sanitized)) {  // minutes under sanitizers, for one thread
    constexpr std::uint64_t million = std::uint64_t{1} << 20;
    measured_backend backend;
    const guarded_table table(device::host(), 4 * million);
    row_exchange exchange(
        table_of(table, 1), backend.device(),
        {.max_batch_rows = 4 * million, .max_calls_in_flight = 3, .staging_bytes = tiny_staging_bytes});
    exchange.tune(3 * million, 64);
    const row_plan plan = exchange.plan_scatter(3 * million);
    CHECK(contains(plan.reason, "gathering 1 MB of random rows"));
    CHECK(backend.max_rows == million);
    CHECK(plan.batches == 1);
    // calls of more rows use the rates of a million rows: nothing is measured again
    const unsigned before = backend.gathers;
    for (const std::uint64_t count : {std::uint64_t{1} << 31, std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
        exchange.tune(count, 64);
        CHECK(exchange.plan_scatter(count).gbps == plan.gbps);
        CHECK(exchange.plan_scatter(count).batches == 1);
    }
    CHECK(backend.gathers == before);
    CHECK(detail::measured_rows(million, 4096) == 512);
    CHECK(detail::measured_rows(million, 4) == 4);
}

TEST_CASE("tuning: measures with the blocks and the staged share that were set") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    {
        row_exchange exchange(table_of(table), backend.device(),
                              {.staging_bytes = tiny_staging_bytes, .blocks = 5});
        exchange.tune(1000);
        CHECK(exchange.plan_gather(1000).blocks == 5);
        CHECK(exchange.plan_gather(1000).reason.ends_with("; 5 thread blocks, as set"));
        CHECK(exchange.plan_scatter(1000).blocks == 5);
        CHECK(backend.blocks == std::set<unsigned>{5});
    }
    backend.ends.clear();
    row_exchange exchange(table_of(table), backend.device(), {.staged_share = 0.25});
    exchange.tune(1000);
    const row_plan plan = exchange.plan_gather(1000);
    CHECK(backend.ends == std::set<std::uint64_t>{750, 1000});
    CHECK(plan.staged_share == (plan.route == row_route::hybrid ? 0.25 : 0));
    CHECK(contains(plan.reason, "0.25 of the rows staged, as set") == (plan.route == row_route::hybrid));
}
