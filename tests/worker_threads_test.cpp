#include "src/core/worker_threads.hpp"

#include <doctest/doctest.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/device.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/rows.hpp"
#include "pinflow/stream.hpp"
#include "src/core/system.hpp"
#include "tests/support/child_process.hpp"

namespace seam = pinflow::detail::system;
using namespace pinflow;

namespace {

/// Lets so many threads start, and refuses the rest.
seam::failure_hook allowing(int count) {
    const auto left = std::make_shared<std::atomic<int>>(count);
    return [left](seam::call what, std::string_view) {
        if (what != seam::call::start_thread) return seam::injected_failure{};
        return seam::injected_failure{.error = left->fetch_sub(1) > 0 ? 0 : EAGAIN};
    };
}

/// Refuses one thread, the one with this number.
seam::failure_hook refusing(int number) {
    const auto count = std::make_shared<std::atomic<int>>(0);
    return [count, number](seam::call what, std::string_view) {
        if (what != seam::call::start_thread) return seam::injected_failure{};
        return seam::injected_failure{.error = count->fetch_add(1) == number ? EAGAIN : 0};
    };
}

std::size_t thread_count() {
    const auto threads = std::filesystem::directory_iterator("/proc/self/task");
    return static_cast<std::size_t>(std::distance(begin(threads), end(threads)));
}

/// thread_count() once a thread was started: a sanitizer starts its own thread with the first.
std::size_t first_thread_count() {
    seam::count_startable_threads(1, 1 << 20);
    return thread_count();
}

array numbers() {
    return {memory_region::anonymous(1 << 20), dtype::of<float>(), {1 << 14, 16}};
}

}  // namespace

// These come first, and in children: oneTBB's workers stay once they were started.

TEST_CASE("worker_threads: as many workers run as were asked for, before there is work for them") {
    CHECK(holds_in_child([] {
        const std::size_t before = first_thread_count();
        const detail::worker_threads workers(24);
        return workers.count() == 24 && workers.reason().empty() && thread_count() == before + 23;
    }));
}

TEST_CASE("worker_threads: if the system refuses threads, count is lower and reason says so") {
    CHECK(holds_in_child([] {
        const std::size_t before = first_thread_count();
        const seam::scoped_failure_hook hook(allowing(17));  // twelve of them are left to others
        const detail::worker_threads workers(24);
        return workers.count() == 6 && workers.reason().starts_with("6 of 24 threads") &&
               thread_count() == before + 5;
    }));
    CHECK(holds_in_child([] {
        const std::size_t before = first_thread_count();
        const seam::scoped_failure_hook hook(allowing(0));
        const detail::worker_threads workers(24);
        return workers.count() == 1 && workers.reason().starts_with("1 of 24 threads") &&
               thread_count() == before;
    }));
}

TEST_CASE("worker_threads: if the system refuses threads, no parallel work starts one") {
    CHECK(holds_in_child([] {
        const std::size_t before = first_thread_count();
        const seam::scoped_failure_hook hook(allowing(0));
        detail::start_worker_threads();
        std::atomic<int> sum = 0;
        tbb::parallel_for(0, 10'000, [&](int i) { sum += i % 2; });
        return sum == 5'000 && thread_count() == before;
    }));
}

TEST_CASE("worker_threads: after fork there is one thread, and the reason names the fork") {
    CHECK(holds_in_child([] {
        const detail::worker_threads of_parent(2);
        return of_parent.count() == 2 && holds_in_child([] {
                   const auto is_alone = [](unsigned wanted) {
                       const detail::worker_threads of_child(wanted);
                       return of_child.count() == 1 && of_child.reason().find("fork") != std::string::npos;
                   };
                   return is_alone(2) && is_alone(3);
               });
    }));
}

TEST_CASE("worker_threads: run_in_parallel makes all calls, in a forked process without oneTBB") {
    // a call by oneTBB has a context, also on the calling thread
    const auto calls_all = [](bool by_tbb) {
        std::vector<std::atomic<int>> calls(1000);
        std::atomic<bool> otherwise = false;
        detail::run_in_parallel(calls.size(), [&](std::size_t i) {
            ++calls[i];
            if ((tbb::task::current_context() != nullptr) != by_tbb) otherwise = true;
        });
        return !otherwise && std::ranges::all_of(calls, [](const auto& count) { return count == 1; });
    };
    CHECK(holds_in_child([&] {
        const auto throws_seven = [](std::size_t i) {
            if (i == 7) throw error("seven");
        };
        bool has_thrown = false;
        try {
            detail::run_in_parallel(50, throws_seven);
        } catch (const error&) {
            has_thrown = true;
        }
        return has_thrown && calls_all(true) && holds_in_child([&] { return calls_all(false); });
    }));
}

TEST_CASE("worker_threads: a refusal is forgotten once threads can be started again") {
    CHECK(holds_in_child([] {
        const std::size_t before = first_thread_count();
        {
            const seam::scoped_failure_hook hook(allowing(14));
            if (detail::worker_threads(24).count() != 3) return false;
        }
        return detail::worker_threads(24).count() == 24 && thread_count() == before + 23;
    }));
}

TEST_CASE("worker_threads: a trial leaves no thread behind") {
    const std::size_t before = first_thread_count();
    CHECK(seam::count_startable_threads(50, 1 << 20) == 50);
    CHECK(thread_count() == before);
}

TEST_CASE("threads: a loader uses the threads that can be started, and reports why they are few") {
    CHECK(holds_in_child([] {
        const seam::scoped_failure_hook hook(refusing(14));
        loader batches({numbers().rows()}, {.device = device::host(), .threads = 16});
        std::uint64_t rows = 0;
        while (const auto batch = batches.next())
            rows += batch->row_count();
        const loader_report report = batches.report();
        return rows == 1 << 14 && report.threads < 16 &&
               report.threads_reason.find("of 16 threads") != std::string::npos;
    }));
}

TEST_CASE("threads: if only a few threads may run, a loader and its consumer's stream run with fewer") {
    for (std::size_t few = 9; few < 24; few += 2) {
        CAPTURE(few);
        CHECK(holds_in_child([few] {
            const std::size_t before = first_thread_count();
            const seam::scoped_failure_hook hook([limit = before + few](seam::call what, std::string_view) {
                const bool is_full = what == seam::call::start_thread && thread_count() >= limit;
                return seam::injected_failure{.error = is_full ? EAGAIN : 0};
            });
            const stream stream(device::host());
            loader batches({numbers().rows()}, {.device = device::host(), .threads = 16});
            std::uint64_t rows = 0;
            while (const auto batch = batches.next(stream))
                rows += batch->row_count();
            stream.synchronize();
            return rows == 1 << 14 && batches.report().threads < 16;
        }));
    }
}

TEST_CASE(
    "threads: however few threads can be started, a loader delivers every row or throws system_failure") {
    for (int count = 0; count < 20; ++count) {
        CAPTURE(count);
        CHECK(holds_in_child([count] {
            const seam::scoped_failure_hook hook(allowing(count));
            try {
                loader batches({numbers().rows()}, {.device = device::host(), .threads = 4});
                std::uint64_t rows = 0;
                while (const auto batch = batches.next())
                    rows += batch->row_count();
                return rows == 1 << 14;
            } catch (const system_failure& refused) {
                return refused.code() == std::errc::resource_unavailable_try_again &&
                       std::string(refused.what()).find("cannot start a thread") != std::string::npos;
            }
        }));
    }
}

TEST_CASE("threads: however few threads can be started, an exchange gathers right or throws system_failure") {
    for (int count = 0; count < 20; ++count) {
        CAPTURE(count);
        CHECK(holds_in_child([count] {
            const seam::scoped_failure_hook hook(allowing(count));
            std::vector<float> rows(1024);
            for (std::size_t i = 0; i < rows.size(); ++i)
                rows[i] = static_cast<float>(i);
            try {
                row_exchange exchange(row_table(std::as_writable_bytes(std::span(rows)), 16), device::host(),
                                      {.threads = 4});
                std::vector<float> gathered(8);
                const std::vector<std::uint64_t> ids{255, 1};
                exchange.gather(ids, reinterpret_cast<std::byte*>(gathered.data()));
                return gathered == std::vector<float>{1020, 1021, 1022, 1023, 4, 5, 6, 7};
            } catch (const system_failure& refused) {
                return refused.code() == std::errc::resource_unavailable_try_again;
            }
        }));
    }
}

TEST_CASE("threads: a stream whose thread is refused is a system_failure") {
    const seam::scoped_failure_hook hook(allowing(0));
    CHECK_THROWS_AS(static_cast<void>(stream{device::host()}), system_failure);
}
