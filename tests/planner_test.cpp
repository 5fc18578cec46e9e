#include "src/rows/exchange_plan.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <future>
#include <limits>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/rows.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_tables.hpp"

// Plans and measurements of the planner, on a device that is the host under another name.

using namespace pinflow;
using detail::exchange_state;
using detail::row_direction;
using detail::row_workload;

namespace {

/// A device that the planner measures, because it is not the host. Counts what is requested of it, and has as
/// much memory as a test allows.
class measured_backend final : public fake_cuda_backend {
 public:
    /// The largest piece of device memory, and of page-locked memory.
    std::uint64_t max_allocated_bytes = ~std::uint64_t{0};
    std::uint64_t max_pinned_bytes = ~std::uint64_t{0};
    bool broken = false;
    /// Called before device memory is allocated, the first step of a measurement.
    std::function<void()> before_allocating = [] {};
    unsigned refused = 0;      ///< pieces
    unsigned gathers = 0;      ///< from the table itself
    unsigned rows_staged = 0;  ///< pieces that were gathered from staging buffers
    std::uint64_t max_rows = 0;
    std::set<unsigned> blocks;     ///< of the gathers from the table
    std::set<std::uint64_t> ends;  ///< of the same
    unsigned sorts = 0;
    std::set<unsigned> scatter_blocks;
    std::uint64_t rows_scattered_directly = 0;
    std::uint64_t rows_scattered_to_staging = 0;

    std::byte* allocate(std::uint64_t size_bytes, void* stream) override {
        before_allocating();
        if (broken) throw fatal_device_error("the device is broken");
        if (size_bytes > max_allocated_bytes) {
            ++refused;
            throw device_error("the device has no such memory");
        }
        return fake_cuda_backend::allocate(size_bytes, stream);
    }
    std::byte* allocate_pinned(std::uint64_t size_bytes) override {
        if (size_bytes > max_pinned_bytes) {
            ++refused;
            throw device_error("so much cannot be page-locked");
        }
        return fake_cuda_backend::allocate_pinned(size_bytes);
    }
    void sort_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                   std::uint64_t* sorted_ids, std::uint32_t* positions, void* stream) override {
        ++sorts;
        fake_cuda_backend::sort_rows(ids, count, row_count, sorted_ids, positions, stream);
    }
    void gather_rows(const detail::row_transfer& transfer, void* stream) override {
        if (transfer.compact) {
            ++rows_staged;
        } else {
            ++gathers;
            max_rows = std::max(max_rows, transfer.end);
            blocks.insert(transfer.blocks);
            ends.insert(transfer.end);
        }
        fake_cuda_backend::gather_rows(transfer, stream);
    }
    void scatter_rows(const detail::row_transfer& transfer, detail::repeated_rows repeated,
                      detail::sum_type type, void* stream) override {
        scatter_blocks.insert(transfer.blocks);
        (transfer.compact ? rows_scattered_to_staging : rows_scattered_directly) +=
            transfer.end - transfer.begin;
        fake_cuda_backend::scatter_rows(transfer, repeated, type, stream);
    }
};

constexpr row_workload gather_of(std::uint64_t count) {
    return {row_direction::gather, count, true};
}
constexpr row_workload scatter_of(std::uint64_t count) {
    return {row_direction::scatter, count, true};
}

row_plan plan_of(exchange_state& exchange, const row_workload& workload) {
    const std::lock_guard lock(exchange.mutex);
    return to_row_plan(plan_rows(exchange, workload));
}

constexpr std::uint64_t row_bytes = 64;
constexpr std::uint64_t table_bytes = std::uint64_t{1} << 20;
/// Too little for staging buffers that are worth measuring.
constexpr std::uint64_t tiny_staging_bytes = 64 << 10;

/// Makes an exchange of rows of 64 bytes. @return whether planning for 1000 rows measures.
bool measures(measured_backend& backend, const row_exchange_options& options, std::size_t misalignment = 0,
              const row_workload& workload = gather_of(1000)) {
    const guarded_table table(device::host(), table_bytes, misalignment);
    exchange_state exchange(row_table(table.bytes(), row_bytes), backend.device(), options);
    const unsigned before = backend.gathers;
    CHECK(contains(plan_of(exchange, workload).reason, "measured"));
    return backend.gathers != before;
}

}  // namespace

TEST_CASE("planner: measures once for exchanges that agree in all parameters that rates depend on") {
    measured_backend backend;
    constexpr row_exchange_options usual{.threads = 2, .staging_bytes = std::uint64_t{1} << 20};
    CHECK(measures(backend, usual));
    CHECK_FALSE(measures(backend, usual));
    CHECK_FALSE(measures(backend, usual, 0, gather_of(1001)));
    CHECK_FALSE(measures(backend, usual, 16));
    row_exchange_options other = usual;
    other.staging_bytes = std::uint64_t{16} << 20;  // other staging buffers
    CHECK(measures(backend, other));
    other.staging_bytes = std::uint64_t{64} << 20;  // as large ones, but more
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
    CHECK(measures(backend, usual, 0, gather_of(5000)));
    CHECK(measures(backend, usual, 0, scatter_of(1000)));
    CHECK(measures(backend, usual, 0, {row_direction::gather, 1000, false}));
}

TEST_CASE("planner: does not try staging buffers that staging_bytes leave too small") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    exchange_state exchange(row_table(table.bytes(), row_bytes), backend.device(),
                            {.staging_bytes = tiny_staging_bytes});
    for (const row_workload& workload : {gather_of(10'000), scatter_of(10'000)}) {
        const row_plan plan = plan_of(exchange, workload);
        CHECK(plan.route == row_route::direct);
        CHECK(plan.gbps > 0);
        CHECK_FALSE(contains(plan.reason, "staged"));
        CHECK_FALSE(contains(plan.reason, "hybrid"));
        CHECK(contains(plan.reason, "leaves buffers of only 32768 bytes"));
    }
    CHECK(backend.rows_staged == 0);
    exchange_state roomy(row_table(table.bytes(), row_bytes), backend.device(), {.staging_bytes = 512 << 10});
    const row_plan plan = plan_of(roomy, gather_of(10'000));
    CHECK(contains(plan.reason, "staged "));
    CHECK(contains(plan.reason, "hybrid sorted "));
    CHECK(contains(plan_of(roomy, scatter_of(10'000)).reason, ", staged "));
    CHECK(backend.rows_staged > 0);
}

TEST_CASE("planner: without memory to measure in, rows take the direct route, and measuring is tried once") {
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
        row_exchange exchange(row_table(table.bytes(), row_bytes), backend.device());
        if (lack == lacking::rows) backend.max_allocated_bytes = count * row_bytes - 1;
        if (lack == lacking::staging) backend.max_allocated_bytes = std::uint64_t{1} << 20;
        if (lack == lacking::pinned_staging) backend.max_pinned_bytes = std::uint64_t{1} << 20;
        exchange.gather(ids_of(ids), rows.data());
        CHECK(rows.holds(gathered(content, row_bytes, ids)));
        CHECK(backend.refused == 1);
        exchange.gather(ids_of(ids), rows.data());
        CHECK(backend.refused == 1);
        exchange.scatter(ids_of(ids), rows.data());
        CHECK(table.holds(content));
        CHECK(backend.refused == 2);
        exchange.scatter(ids_of(ids), rows.data());
        CHECK(backend.refused == 2);
        exchange_state again(row_table(table.bytes(), row_bytes), backend.device(), {});
        for (const row_workload& workload : {gather_of(count), scatter_of(count)}) {
            const row_plan plan = plan_of(again, workload);
            CHECK(plan.route == row_route::direct);
            CHECK(plan.sorted);
            CHECK(plan.blocks > 0);
            CHECK(plan.gbps == 0);
            CHECK(plan.reason.starts_with("not measured: "));
            CHECK(contains(plan.reason,
                           lack == lacking::pinned_staging ? "cannot be page-locked" : "no such memory"));
        }
        CHECK(backend.refused == 2);
        exchange_state long_rows(row_table(table.bytes(), 4096), backend.device(), {});
        const row_plan plan = plan_of(long_rows, gather_of(table_bytes / 4096));
        CHECK(plan.reason.starts_with("not measured: "));
        CHECK_FALSE(plan.sorted);
    }
}

TEST_CASE("planner: a device that is broken is not planned for") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    exchange_state exchange(row_table(table.bytes(), row_bytes), backend.device(), {});
    backend.broken = true;
    CHECK_THROWS_AS(plan_of(exchange, gather_of(1000)), fatal_device_error);
    backend.broken = false;
    CHECK(plan_of(exchange, gather_of(1000)).reason.starts_with("measured"));  // nothing was remembered
}

TEST_CASE("planner: a plan that is known is given while another is measured") {
    measured_backend backend;
    measured_backend slow;
    const guarded_table table(device::host(), table_bytes);
    exchange_state known(row_table(table.bytes(), row_bytes), backend.device(), {});
    exchange_state unknown(row_table(table.bytes(), row_bytes), slow.device(), {});
    const row_plan plan = plan_of(known, gather_of(1000));
    gate reached;
    gate held;
    slow.before_allocating = [&] {
        reached.open();
        held.wait();
    };
    auto measured = std::async(std::launch::async, [&] { return plan_of(unknown, gather_of(1000)); });
    reached.wait();
    auto given = std::async(std::launch::async, [&] { return plan_of(known, gather_of(1000)); });
    CHECK(given.wait_for(std::chrono::seconds(10)) == std::future_status::ready);
    held.open();
    CHECK(given.get().reason == plan.reason);
    CHECK(measured.get().reason.starts_with("measured"));
}

TEST_CASE("planner: simultaneous requests are measured once") {
    measured_backend once;
    CHECK(measures(once, {.threads = 1}));
    measured_backend backend;
    constexpr int askers = 4;
    std::barrier begin(askers);
    std::vector<std::future<row_plan>> plans;
    const guarded_table table(device::host(), table_bytes);
    for (int asker = 0; asker < askers; ++asker) {
        plans.push_back(std::async(std::launch::async, [&] {
            exchange_state exchange(row_table(table.bytes(), row_bytes), backend.device(), {.threads = 1});
            begin.arrive_and_wait();
            return plan_of(exchange, gather_of(1000));
        }));
    }
    std::set<std::string> reasons;
    for (std::future<row_plan>& plan : plans)
        reasons.insert(plan.get().reason);
    CHECK(reasons.size() == 1);
    CHECK(backend.gathers == once.gathers);
}

TEST_CASE("planner: a failed measurement is repeated at the next request") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    exchange_state first(row_table(table.bytes(), row_bytes), backend.device(), {});
    exchange_state next(row_table(table.bytes(), row_bytes), backend.device(), {});
    gate reached;
    gate held;
    backend.before_allocating = [&, fails = true]() mutable {
        if (!std::exchange(fails, false)) return;
        reached.open();
        held.wait();
        throw fatal_device_error("the device is broken");
    };
    auto failed = std::async(std::launch::async, [&] { return plan_of(first, gather_of(1000)); });
    reached.wait();
    auto measured = std::async(std::launch::async, [&] { return plan_of(next, gather_of(1000)); });
    held.open();
    CHECK_THROWS_AS(failed.get(), fatal_device_error);
    CHECK(measured.get().reason.starts_with("measured"));
}

TEST_CASE("planner: measures with a million rows at most, however small they are") {
    constexpr std::uint64_t million = std::uint64_t{1} << 20;
    measured_backend backend;
    const guarded_table table(device::host(), 4 * million);
    exchange_state exchange(row_table(table.bytes(), 1), backend.device(),
                            {.staging_bytes = tiny_staging_bytes});
    const row_plan plan = plan_of(exchange, scatter_of(3 * million));
    CHECK(contains(plan.reason, "gathering 1 MB of random rows"));
    CHECK(backend.max_rows == million);
    // more rows would be measured with as many
    const unsigned before = backend.gathers;
    CHECK(plan_of(exchange, scatter_of(std::uint64_t{1} << 31)).gbps == plan.gbps);
    const std::lock_guard lock(exchange.mutex);
    CHECK(batches_worth_taking(exchange, scatter_of(3 * million)) == 1);
    // so many that the bytes of 64 batches overflow 64 bits
    CHECK(batches_worth_taking(exchange, scatter_of(std::uint64_t{1} << 62)) == 1);
    CHECK(batches_worth_taking(exchange, scatter_of(~std::uint64_t{0})) == 1);
    CHECK(backend.gathers == before);
    CHECK(detail::measured_rows(row_table(table.bytes(), million), 4096) == 512);
    CHECK(detail::measured_rows(row_table(table.bytes(), million), 4) == 4);
}

TEST_CASE("planner: measures with the blocks and the staged share that were set") {
    measured_backend backend;
    const guarded_table table(device::host(), table_bytes);
    {
        exchange_state exchange(row_table(table.bytes(), row_bytes), backend.device(),
                                {.staging_bytes = tiny_staging_bytes, .blocks = 5});
        const row_plan plan = plan_of(exchange, gather_of(1000));
        CHECK(plan.blocks == 5);
        CHECK(plan.reason.ends_with("; 5 thread blocks, as set"));
        CHECK(plan_of(exchange, gather_of(1000)).reason == plan.reason);
        CHECK(plan_of(exchange, scatter_of(1000)).blocks == 5);
        CHECK(backend.blocks == std::set<unsigned>{5});
    }
    backend.ends.clear();
    exchange_state exchange(row_table(table.bytes(), row_bytes), backend.device(), {.staged_share = 0.25});
    const row_plan plan = plan_of(exchange, gather_of(1000));
    CHECK(backend.ends == std::set<std::uint64_t>{750, 1000});
    CHECK(plan.staged_share == (plan.route == row_route::hybrid ? 0.25 : 0));
    CHECK(contains(plan.reason, "0.25 of the rows staged, as set") == (plan.route == row_route::hybrid));
}

TEST_CASE("planner: a forced route uses the blocks and the staged share that were set") {
    on_each_device([](const device& device) {
        const guarded_table table(device, table_bytes);
        const auto planned = [&](const row_exchange_options& options, const row_workload& workload) {
            exchange_state exchange(row_table(table.bytes(), row_bytes), device, options);
            return plan_of(exchange, workload);
        };
        row_plan plan = planned({.route = row_route::hybrid}, gather_of(10));
        CHECK(plan.route == row_route::hybrid);
        CHECK(plan.staged_share == 0.4);
        CHECK(plan.blocks > 0);
        CHECK(plan.reason == "set in the options");
        plan = planned({.route = row_route::hybrid, .blocks = 9, .staged_share = 0.125}, gather_of(10));
        CHECK(plan.staged_share == 0.125);
        CHECK(plan.blocks == 9);
        CHECK(contains_all(plan.reason, {"set in the options", "9 thread blocks, as set",
                                         "0.125 of the rows staged, as set"}));
        for (const row_workload& workload : {gather_of(10), scatter_of(10)}) {
            plan = planned({.route = row_route::direct, .blocks = 9, .staged_share = 0.5}, workload);
            CHECK(plan.blocks == 9);
            CHECK(plan.staged_share == 0);
            CHECK(contains_all(plan.reason, {"set in the options", "9 thread blocks, as set"}));
            CHECK_FALSE(contains(plan.reason, "staged"));
            plan = planned({.route = row_route::staged, .blocks = 9, .staged_share = 0.5}, workload);
            CHECK(plan.blocks == 0);
            CHECK(plan.staged_share == 0);
            CHECK(plan.reason == "set in the options");
        }
    });
}

TEST_CASE("planner: with the direct route requested, rows are sorted unless each is a page or more") {
    measured_backend backend;
    std::mt19937_64 random(12);
    const auto content = random_bytes(std::size_t{4096} * 4080, random);
    const guarded_table table(device::host(), content);
    const id_vector ids{3, 1, 3};
    const auto sorts = [&](row_route route, std::uint64_t row_size_bytes, row_direction direction) {
        const guarded_rows rows(device::host(), gathered(content, row_size_bytes, ids));
        row_exchange exchange(row_table(table.bytes(), row_size_bytes), backend.device(), {.route = route});
        backend.sorts = 0;
        if (direction == row_direction::gather) {
            exchange.gather(ids_of(ids), rows.data());
        } else {
            exchange.scatter(ids_of(ids), rows.data());
        }
        CHECK(rows.holds(gathered(content, row_size_bytes, ids)));
        CHECK(table.holds(content));
        return backend.sorts != 0;
    };
    CHECK(sorts(row_route::direct, 4080, row_direction::gather));
    CHECK_FALSE(sorts(row_route::direct, 4096, row_direction::gather));
    for (const std::uint64_t row_size_bytes : {4080U, 4096U}) {
        CHECK(sorts(row_route::direct, row_size_bytes, row_direction::scatter));
        CHECK(sorts(row_route::hybrid, row_size_bytes, row_direction::gather));
    }
}

TEST_CASE("planner: few thread blocks move rows, and more if there is much work for each byte") {
    const auto planned = [](std::span<std::byte> rows, std::uint64_t row_size_bytes,
                            const row_workload& workload) {
        exchange_state exchange(row_table(rows, row_size_bytes), device::host(),
                                {.route = row_route::direct});
        return plan_of(exchange, workload).blocks;
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
    const unsigned few = planned(table.bytes(), row_bytes, gather_of(10));
    CHECK(few > 0);
    CHECK(few < 32);
    CHECK(planned(table.bytes(), row_bytes, scatter_of(10)) == few);
    CHECK(planned(large_rows, row_bytes, gather_of(10)) == few);
    CHECK(planned(large_rows, row_bytes, scatter_of(10)) > few);
    CHECK(planned(large_rows, 4096, scatter_of(10)) == few);
    for (const std::span rows : {table.bytes(), large_rows}) {
        CHECK(planned(rows, 2048, gather_of(10)) == few);
        CHECK(planned(rows, 4096, gather_of(10)) == few / 2);
    }
    for (const row_workload& workload : {gather_of(10), scatter_of(10)}) {
        CHECK(planned(table.bytes(), 128, workload) == few);
        CHECK(planned(table.bytes(), 8, workload) == 32);
        CHECK(planned(misaligned.bytes(), row_bytes, workload) == 32);
        CHECK(planned(misaligned.bytes(), 8192, workload) == few);
        CHECK(planned(large_rows, 8, workload) == 16);
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
    // through staging buffers: all threads that have work
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
            CHECK(contains(failure.what(), "the staged share of the hybrid route must be 0"));
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
            CHECK(contains_all(plan.reason, {"set in the options", "0.3 of the rows staged, as set"}));
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

TEST_CASE("planner: scatters are staged if that is expected to be clearly faster") {
    const auto is = [](double direct_gather, double staged_gather, double link, row_route route,
                       double gbps) {
        const detail::rated_plan judged = detail::judge_scatter(
            {.is_scatter = true, .not_reached_reason = {}}, direct_gather, staged_gather, link);
        CAPTURE(direct_gather);
        CAPTURE(staged_gather);
        CHECK(to_row_plan(judged).route == route);
        CHECK(judged.gbps == doctest::Approx(gbps));
    };
    // as measured with rows of 512 bytes from 10 million, 16 GiB and 48 GiB
    is(47.7, 27.5, 55.0, row_route::direct, 50.562);
    is(42.4, 30.0, 55.0, row_route::direct, 44.944);
    is(26.3, 30.1, 55.0, row_route::staged, 42.14);
    // neither is faster than rows that lie in order
    is(54.0, 60.0, 55.0, row_route::direct, 55.0);
    is(20.0, 60.0, 55.0, row_route::staged, 55.0);
    is(30.0, 0, 55.0, row_route::direct, 31.8);
}
