#include "src/core/fork_gate.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <future>
#include <thread>
#include <utility>

#include "tests/support/child_process.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow::detail;

namespace {

/// Runs `work` in a section of another thread, which ends once `end` opens: ThreadSanitizer reports threads
/// that have ended, but were not joined, in a child.
template <typename Work>
std::thread in_section(Work work, const gate& end) {
    watch_forks();
    std::promise<void> begun;
    const std::future<void> is_begun = begun.get_future();
    std::thread thread([work, &end, begins = std::move(begun)]() mutable {
        {
            const unforked_section section;
            begins.set_value();
            work();
        }
        end.wait();
    });
    is_begun.wait();
    return thread;
}

}  // namespace

TEST_CASE("fork gate: a fork waits until a section that it asks to end has ended") {
    std::atomic<bool> has_ended = false;
    std::atomic<bool> gives_up = false;
    const gate end;
    std::thread thread = in_section(
        [&] {
            while (!is_fork_pending() && !gives_up)
                std::this_thread::yield();
            has_ended = !gives_up;
        },
        end);
    CHECK(holds_in_child([&] {
        const unforked_section own;  // the child has sections of its own
        return has_ended.load();
    }));
    gives_up = true;
    end.open();
    thread.join();
    CHECK_FALSE(is_fork_pending());
}

TEST_CASE("fork gate: a section that does not end delays a fork, and keeps neither process from going on") {
    const gate end;
    std::thread thread = in_section([&] { end.wait(); }, end);
    CHECK(holds_in_child([] {
        const unforked_section own;
        return !is_fork_pending();
    }));
    {
        const unforked_section another;
    }
    end.open();
    thread.join();
}
