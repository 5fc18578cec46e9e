#include <doctest/doctest.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <atomic>
#include <chrono>
#include <future>
#include <random>

#include "pinflow/rows.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/support/devices.hpp"
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

namespace {

/// A device on which enqueuing on one stream blocks the caller, as a full queue does.
class full_stream_backend final : public fake_cuda_backend {
 public:
    void* full = nullptr;
    gate has_blocked;
    gate has_room;

    void record_event(void* event, void* stream) override {
        enqueue_on(stream);
        fake_cuda_backend::record_event(event, stream);
    }
    void stream_wait_event(void* stream, void* event) override {
        enqueue_on(stream);
        fake_cuda_backend::stream_wait_event(stream, event);
    }
    std::byte* allocate(std::uint64_t size_bytes, void* stream) override {
        enqueue_on(stream);
        return fake_cuda_backend::allocate(size_bytes, stream);
    }
    void gather_rows(const detail::row_transfer& transfer, void* stream) override {
        enqueue_on(stream);
        fake_cuda_backend::gather_rows(transfer, stream);
    }

 private:
    void enqueue_on(void* stream) {
        if (stream != full) return;
        has_blocked.open();
        has_room.wait();
    }
};

}  // namespace

TEST_CASE("rows async: a full queue holds up its own callers only") {
    std::mt19937_64 random(21);
    const auto content = random_bytes(1 << 20, random);
    const guarded_table table(device::host(), content);
    const id_vector ids = make_ids(id_order::random, 3000, (1 << 20) / 64, random);
    for (const row_route route :
         {row_route::direct, row_route::staged, row_route::hybrid, row_route::automatic}) {
        for (const id_place place : every_id_place) {
            CAPTURE(to_string(route));
            CAPTURE(static_cast<int>(place));
            full_stream_backend backend;
            const guarded_rows stuck_rows(device::host(), ids.size() * 64);
            const guarded_rows rows(device::host(), ids.size() * 64);
            const id_list list(device::host(), ids, place);
            row_exchange exchange(row_table(table.bytes(), 64), backend.device(),
                                  {.route = route, .staging_bytes = 1 << 16});
            const stream stuck(backend.device());
            const stream other(backend.device());
            backend.full = stuck.view().native_handle();
            auto blocked = std::async(std::launch::async, [&] {
                exchange.gather_async(list.get(), stuck_rows.data(), stuck);
                stuck.synchronize();
            });
            backend.has_blocked.wait();
            auto passed = std::async(std::launch::async, [&] {
                exchange.gather_async(list.get(), rows.data(), other);
                other.synchronize();
                exchange.check();
                exchange.gather(list.get(), rows.data());
            });
            CHECK(passed.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
            CHECK(rows.holds(gathered(content, 64, ids)));
            backend.has_room.open();
            blocked.get();
            passed.get();
            exchange.check();
            CHECK(stuck_rows.holds(gathered(content, 64, ids)));
        }
    }
}
