#include "src/device/host/host_stream.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <string>

#include "pinflow/error.hpp"
#include "pinflow/stream.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;

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
    auto* const stream = new detail::host_stream;
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> watch = held;
    stream->enqueue([held = std::move(held)] {});
    stream->synchronize();
    CHECK(watch.expired());
    detail::host_stream::end(stream);
}

TEST_CASE("host stream: its end does not wait for work, which runs all the same") {
    auto* const stream = new detail::host_stream;
    const gate gate;
    std::promise<void> ran;
    stream->enqueue(gate.waiter());
    stream->enqueue([&] { ran.set_value(); });
    detail::host_stream::end(stream);
    gate.open();
    ran.get_future().get();
}

TEST_CASE("host stream: its own work may end it") {
    auto* const stream = new detail::host_stream;
    const gate gate;
    std::promise<void> ran;
    stream->enqueue(gate.waiter());
    stream->enqueue([stream] { detail::host_stream::end(stream); });
    stream->enqueue([&] { ran.set_value(); });
    gate.open();  // not before all calls of this thread have returned
    ran.get_future().get();
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
