#include "src/load/load_threads.hpp"

#include <doctest/doctest.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/sanitized.hpp"

namespace seam = pinflow::detail::system;
using pinflow::detail::load_thread;

namespace {

/// The thread ID of some work.
::pid_t id_of_one_thread() {
    std::atomic<::pid_t> id = 0;
    const load_thread thread([&] { id = ::gettid(); });
    thread.join();
    return id;
}

bool is_running(::pid_t thread) {
    return std::filesystem::exists("/proc/self/task/" + std::to_string(thread));
}

}  // namespace

TEST_CASE("load threads: one load after another runs on one thread, which ends when no load follows") {
    std::set<::pid_t> threads;
    for (int repetition = 0; repetition < 1000; ++repetition)
        threads.insert(id_of_one_thread());
    CHECK_FALSE(threads.contains(::gettid()));
    CHECK(threads.size() < 20);  // a stall of 100 ms may end a thread
    const auto are_running = [&] { return std::ranges::any_of(threads, is_running); };
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (are_running() && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    CHECK_FALSE(are_running());
    CHECK(id_of_one_thread() != 0);
}

TEST_CASE("load threads: works that wait for each other all run at once") {
    constexpr unsigned count = 40;
    for (int repetition = 0; repetition < 20; ++repetition) {
        std::atomic<unsigned> started = 0, ended = 0;
        std::vector<load_thread> threads;
        for (unsigned i = 0; i < count; ++i) {
            threads.emplace_back([&] {
                ++started;
                while (started < count)
                    std::this_thread::yield();
                ++ended;
            });
        }
        for (const load_thread& each : threads)
            each.join();
        CHECK(ended == count);
    }
}

TEST_CASE("load threads: a thread may start another one, and several threads may load at once") {
    std::vector<std::thread> loaders;
    std::atomic<unsigned> done = 0;
    for (unsigned loader = 0; loader < 4; ++loader) {
        loaders.emplace_back([&] {
            for (int repetition = 0; repetition < 200; ++repetition) {
                load_thread inner;
                const load_thread outer([&] {
                    inner = load_thread([&] { ++done; });
                    ++done;
                });
                outer.join();
                inner.join();
            }
        });
    }
    for (std::thread& each : loaders)
        each.join();
    CHECK(done == 1600);
}

TEST_CASE("load threads: a thread that the system refuses is an error, even if another one is idle") {
    static_cast<void>(id_of_one_thread());
    {
        const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
            return seam::injected_failure{.error = what == seam::call::start_thread ? EAGAIN : 0};
        });
        CHECK_THROWS_AS(load_thread([] {}), pinflow::system_failure);
    }
    CHECK(id_of_one_thread() != 0);
}

TEST_CASE("load threads: a thread runs on the cores of its caller") {
    static_cast<void>(id_of_one_thread());
    ::cpu_set_t before, one, found;
    REQUIRE(::sched_getaffinity(0, sizeof before, &before) == 0);
    CPU_ZERO(&one);
    for (std::size_t core = 0; CPU_COUNT(&one) == 0; ++core) {
        if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
    }
    REQUIRE(::sched_setaffinity(0, sizeof one, &one) == 0);
    load_thread([&] { ::sched_getaffinity(0, sizeof found, &found); }).join();
    REQUIRE(::sched_setaffinity(0, sizeof before, &before) == 0);
    CHECK(CPU_EQUAL(&found, &one));
    load_thread([&] { ::sched_getaffinity(0, sizeof found, &found); }).join();
    CHECK(CPU_EQUAL(&found, &before));
}

// ThreadSanitizer ends a forked process that starts a thread.
TEST_CASE("load threads: a forked process starts threads of its own" * doctest::skip(sanitized)) {
    static_cast<void>(id_of_one_thread());
    CHECK(holds_in_child([] { return id_of_one_thread() != 0; }));
}
