#include <doctest/doctest.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "pinflow/rows.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_tables.hpp"
#include "tests/support/sanitized.hpp"

using namespace pinflow;

TEST_CASE("rows: a thread in a call from a TBB task runs no unrelated task, which might make a call, too") {
    constexpr std::uint64_t row_count = 300;
    // Copying the indices takes about 18 tasks. Without isolation, about one run in five fails on two cores.
    constexpr std::size_t id_count = 300'000;
    std::mt19937_64 random(41);
    const device host = device::host();
    const guarded_table table(host, random_bytes(row_count * 8, random));
    row_exchange exchange(row_table(table.bytes(), 8), host, {.max_batch_rows = id_count});
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
            if (task % 4 != 0) return;  // threads that take these are then free to help with a call's loops
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

TEST_CASE("rows async: a call from a cancelled task of oneTBB copies its indices") {
    std::mt19937_64 random(91);
    const auto content = random_bytes(4096, random);
    const guarded_table table(device::host(), content);
    row_exchange exchange(row_table(table.bytes(), 64), device::host());
    const id_vector ids{3, 1, 60};
    const guarded_rows rows(device::host(), ids.size() * 64);
    tbb::task_group_context cancelled;
    tbb::parallel_for(
        0, 1,
        [&](int) {
            cancelled.cancel_group_execution();
            exchange.gather(ids_of(ids), rows.data());
        },
        cancelled);
    CHECK(rows.holds(gathered(content, 64, ids)));
}

TEST_CASE("rows async: a stream that is being captured into a graph is refused") {
    fake_cuda_backend backend;
    const guarded_table table(device::host(), 4096);
    row_exchange exchange(row_table(table.bytes(), 64), backend.device());
    const guarded_rows rows(device::host(), 64);
    const stream captured(backend.device());
    const stream stream(backend.device());
    backend.captured = captured.view().native_handle();
    const id_vector ids{1};
    const std::string reason =
        message_of<unsupported>([&] { exchange.gather_async(ids_of(ids), rows.data(), captured); });
    CHECK(contains(reason, "CUDA graph"));
    CHECK_THROWS_AS(exchange.scatter_async(ids_of(ids), rows.data(), duplicate_policy::last, captured),
                    unsupported);
    exchange.gather_async(ids_of(ids), rows.data(), stream);
    stream.synchronize();
    exchange.check();
}

namespace {

/// A device on which one operation on one stream blocks the caller, as a full queue does.
class full_stream_backend final : public fake_cuda_backend {
 public:
    void* full = nullptr;
    int blocking = 0;  ///< the number of the operation, from 0
    std::atomic<int> operations = 0;
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
    void release(std::byte* data, std::uint64_t size_bytes, void* stream,
                 std::span<const event> events) noexcept override {
        enqueue_on(stream);
        fake_cuda_backend::release(data, size_bytes, stream, events);
    }
    void copy_to_host(std::span<std::byte> destination, const std::byte* source, void* stream) override {
        enqueue_on(stream);
        fake_cuda_backend::copy_to_host(destination, source, stream);
    }
    void fill_zero(std::byte* data, std::uint64_t size_bytes, void* stream) override {
        enqueue_on(stream);
        fake_cuda_backend::fill_zero(data, size_bytes, stream);
    }
    void check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                    const detail::error_memory& errors, void* stream) override {
        enqueue_on(stream);
        fake_cuda_backend::check_rows(ids, count, row_count, errors, stream);
    }
    void sort_rows(const detail::row_sort& sort, void* stream) override {
        enqueue_on(stream);
        fake_cuda_backend::sort_rows(sort, stream);
    }
    void gather_rows(const detail::row_transfer& transfer, void* stream) override {
        enqueue_on(stream);
        fake_cuda_backend::gather_rows(transfer, stream);
    }
    void scatter_rows(const detail::row_transfer& transfer, detail::repeated_rows repeated,
                      detail::sum_type type, void* stream) override {
        enqueue_on(stream);
        fake_cuda_backend::scatter_rows(transfer, repeated, type, stream);
    }

 private:
    void enqueue_on(void* stream) noexcept {
        if (stream != full || operations++ != blocking) return;
        has_blocked.open();
        has_room.wait();
    }
};

}  // namespace

TEST_CASE("rows async: a full queue holds up its own callers only, whichever operation finds it full") {
    std::mt19937_64 random(21);
    const auto content = random_bytes(1 << 16, random);
    const guarded_table table(device::host(), content);
    id_vector ids((1 << 16) / 64);
    std::iota(ids.begin(), ids.end(), std::uint64_t{0});
    std::ranges::shuffle(ids, random);
    // the two callers work on rows of their own
    const id_vector stuck_ids(ids.begin(), ids.begin() + 500);
    ids.erase(ids.begin(), ids.begin() + 500);
    const auto stuck_expected = gathered(content, 64, stuck_ids);
    const auto expected = gathered(content, 64, ids);
    const guarded_rows stuck_rows(device::host(), stuck_expected);
    const guarded_rows rows(device::host(), expected);
    int max_operations = 0;
    // @return whether the call got as far as that operation
    const auto is_held_up = [&](row_route route, id_place place, bool scatters, int operation) {
        full_stream_backend backend;
        const id_list list(device::host(), ids, place);
        const id_list stuck_list(device::host(), stuck_ids, place);
        row_exchange exchange(row_table(table.bytes(), 64), backend.device(),
                              {.route = route, .staging_bytes = 1 << 14});
        const stream stuck(backend.device());
        const stream other(backend.device());
        backend.full = stuck.view().native_handle();
        backend.blocking = operation;
        const auto call = [&](const id_list& own_list, const guarded_rows& own, const stream& stream) {
            if (scatters) {
                exchange.scatter_async(own_list.get(), own.data(), duplicate_policy::error, stream);
            } else {
                exchange.gather_async(own_list.get(), own.data(), stream);
            }
        };
        auto blocked = std::async(std::launch::async, [&] {
            call(stuck_list, stuck_rows, stuck);
            backend.has_blocked.open();
        });
        backend.has_blocked.wait();
        auto passed = std::async(std::launch::async, [&] {
            call(list, rows, other);
            other.synchronize();
            exchange.check();
            exchange.gather(list.get(), rows.data());
        });
        CHECK(passed.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
        backend.has_room.open();
        blocked.get();
        passed.get();
        stuck.synchronize();
        exchange.check();
        max_operations = std::max(max_operations, backend.operations.load());
        return backend.operations > operation;
    };
    for (const row_route route : {row_route::direct, row_route::staged, row_route::hybrid}) {
        for (const id_place place : {id_place::host, id_place::device}) {
            for (const bool scatters : {false, true}) {
                CAPTURE(to_string(route));
                CAPTURE(static_cast<int>(place));
                CAPTURE(scatters);
                int operation = 0;
                while (is_held_up(route, place, scatters, operation))
                    ++operation;
                CHECK(operation > 2);
                CHECK(rows.holds(expected));
                CHECK(stuck_rows.holds(stuck_expected));
                CHECK(table.holds(content));
            }
        }
    }
    CHECK(max_operations >= 7);
}

TEST_CASE("rows async: calls of several threads on one stream take place one after the other") {
    // on the staged route, the CPU copies rows: two calls at once would tear them
    constexpr std::uint64_t row_bytes = 256 << 10;
    constexpr unsigned callers = 3;
    const device host = device::host();
    const guarded_table table(host, std::vector<std::byte>(2 * row_bytes));
    row_exchange exchange(row_table(table.bytes(), row_bytes), host,
                          {.route = row_route::staged, .threads = 1, .staging_bytes = 2 * row_bytes});
    const id_vector row{1};
    std::atomic<int> torn = 0;
    const auto is_torn = [](std::span<const std::byte> bytes) {
        return std::ranges::any_of(bytes, [&](std::byte each) { return each != bytes[0]; });
    };
    std::vector<std::thread> threads;
    for (unsigned caller = 0; caller < callers; ++caller) {
        threads.emplace_back([&, caller] {
            std::vector<std::byte> own(row_bytes);
            for (int i = 0; i < 40; ++i) {
                std::ranges::fill(own, static_cast<std::byte>(caller + 1));
                exchange.scatter(ids_of(row), own.data());
                exchange.gather(ids_of(row), own.data());
                torn += is_torn(own) ? 1 : 0;
            }
        });
    }
    for (std::thread& each : threads)
        each.join();
    CHECK(torn == 0);
}
