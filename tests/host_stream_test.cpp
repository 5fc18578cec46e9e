#include "src/device/host/host_stream.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/stream.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;

using detail::host_stream;

TEST_CASE("host event: an object kept until a mark passes is released when it passes, not before") {
    detail::host_event event;
    CHECK(event.last_mark() == nullptr);
    const auto object = std::make_shared<int>(1);
    const auto first = std::make_shared<detail::host_mark>();
    event.set_last_mark(first);
    first->keep_until_passed(object);
    CHECK(object.use_count() == 2);
    const auto second = std::make_shared<detail::host_mark>();
    event.set_last_mark(second);
    CHECK(event.last_mark() == second);
    second->keep_until_passed(object);
    CHECK(object.use_count() == 3);
    first->pass();
    CHECK(object.use_count() == 2);
    second->pass();
    CHECK(object.use_count() == 1);
    second->keep_until_passed(object);
    CHECK(object.use_count() == 1);
}

TEST_CASE("host stream: objects held by a task are destroyed before the task counts as finished") {
    for (const auto where : {host_stream::runs_on::own_thread, host_stream::runs_on::caller}) {
        auto* const stream = new host_stream(where);
        auto held = std::make_shared<int>(1);
        const std::weak_ptr<int> watch = held;
        stream->enqueue([held = std::move(held)] {});
        stream->synchronize();
        CHECK(watch.expired());
        host_stream::end(stream);
    }
}

TEST_CASE("host stream: its end does not wait for work, which runs all the same") {
    auto* const stream = new host_stream(host_stream::runs_on::own_thread);
    const gate gate;
    std::promise<void> ran;
    stream->enqueue(gate.waiter());
    stream->enqueue([&] { ran.set_value(); });
    host_stream::end(stream);
    gate.open();
    ran.get_future().get();
}

TEST_CASE("host stream: its own work may end it") {
    auto* const stream = new host_stream(host_stream::runs_on::own_thread);
    const gate gate;
    std::promise<void> ran;
    stream->enqueue(gate.waiter());
    stream->enqueue([stream] { host_stream::end(stream); });
    stream->enqueue([&] { ran.set_value(); });
    gate.open();  // not before all calls of this thread have returned
    ran.get_future().get();
}

TEST_CASE("host stream: work that a caller runs may end its stream") {
    auto* const stream = new host_stream(host_stream::runs_on::caller);
    bool ran = false;
    stream->enqueue([&] {
        host_stream::end(stream);
        ran = true;
    });
    CHECK(ran);  // AddressSanitizer sees whether the stream was used later, or leaked
}

TEST_CASE("host stream: without a thread of its own, callers run what they enqueue, one at a time") {
    auto* const stream = new host_stream(host_stream::runs_on::caller);
    std::atomic<int> running = 0;
    std::atomic<int> overlaps = 0;
    std::atomic<int> elsewhere = 0;
    constexpr int thread_count = 4;
    constexpr int calls = 500;
    int ran = 0;  // not atomic: one at a time
    std::vector<std::thread> threads;
    for (int i = 0; i < thread_count; ++i) {
        threads.emplace_back([&] {
            for (int call = 0; call < calls; ++call) {
                int mine = 0;
                stream->enqueue([&, caller = std::this_thread::get_id()] {
                    if (++running != 1) ++overlaps;
                    if (std::this_thread::get_id() != caller) ++elsewhere;
                    ++ran;
                    mine = 1;
                    --running;
                });
                if (mine != 1) ++elsewhere;
                const auto mark = std::make_shared<detail::host_mark>();
                stream->record(mark);
                if (!mark->passed()) ++elsewhere;
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(overlaps == 0);
    CHECK(elsewhere == 0);
    CHECK(ran == thread_count * calls);
    CHECK(stream->done());
    stream->synchronize();
    host_stream::end(stream);
}

TEST_CASE(
    "host stream: work on the caller's thread is complete in a cancelled task, and begins no other task") {
    auto* const stream = new host_stream(host_stream::runs_on::caller);
    constexpr int parts = 200;
    constexpr int tasks = 400;
    std::atomic<int> ran = 0;
    std::atomic<int> nested = 0;
    const tbb::global_control more_threads(tbb::global_control::max_allowed_parallelism, 4);
    tbb::task_arena arena(4);
    arena.execute([&] {
        tbb::parallel_for(0, tasks, [&](int task) {
            thread_local bool calling = false;
            if (calling) {
                ++nested;
                return;
            }
            if (task % 4 != 0) return;  // threads that take these are then free to help with a call's loop
            calling = true;
            stream->enqueue(
                [&] { tbb::parallel_for(0, parts, [&](int) { ++ran; }, tbb::simple_partitioner()); });
            calling = false;
        });
    });
    CHECK(ran == tasks / 4 * parts);
    CHECK(nested == 0);
    ran = 0;
    tbb::task_group_context cancelled;
    tbb::parallel_for(
        0, 1,
        [&](int) {
            cancelled.cancel_group_execution();
            stream->enqueue([&] { tbb::parallel_for(0, parts, [&](int) { ++ran; }); });
        },
        cancelled);
    CHECK(ran == parts);
    host_stream::end(stream);
}

TEST_CASE("host stream: calls in a forked child are refused, as the stream's thread is in the parent only") {
    const stream stream(device::host());
    stream.synchronize();
    const ::pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        try {
            stream.host_function_async([] {});
        } catch (const device_error& error) {
            ::_exit(std::string(error.what()).find("forked") == std::string::npos ? 2 : 0);
        }
        ::_exit(1);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}
