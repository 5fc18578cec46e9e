#include <doctest/doctest.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <atomic>
#include <random>

#include "pinflow/rows.hpp"
#include "tests/support/row_tables.hpp"
#include "tests/support/sanitized.hpp"

using namespace pinflow;

TEST_CASE("rows: a call made by a TBB task starts no other task, which might also make a call") {
    constexpr std::uint64_t row_count = 300;
    // several tasks' worth; loops that are not isolated are found in a run of five, on two cores
    constexpr std::size_t id_count = 300'000;
    std::mt19937_64 random(41);
    const device host = device::host();
    const guarded_table table(host, random_bytes(row_count * 8, random));
    row_exchange exchange(row_table(table.bytes(), 8), host);
    const id_vector ids = make_ids(id_order::random, id_count, row_count, random);
    const stream stream(host);
    const device_buffer rows(id_count * 8, stream);
    std::atomic<int> nested = 0;
    std::atomic<int> calls = 0;
    const tbb::global_control more_threads(tbb::global_control::max_allowed_parallelism, 4);
    tbb::task_arena arena(4);
    constexpr int tasks = sanitized ? 200 : 1000;
    arena.execute([&] {
        tbb::parallel_for(0, tasks, [&](int task) {
            thread_local bool calling = false;
            if (calling) {
                ++nested;
                return;
            }
            if (task % 4 != 0) return;  // whoever has these comes to help with a call's own loops
            calling = true;
            exchange.gather_async(ids_of(ids), rows.data(), stream);
            calling = false;
            ++calls;
        });
    });
    stream.synchronize();
    CHECK(nested == 0);
    CHECK(calls == tasks / 4);
}
