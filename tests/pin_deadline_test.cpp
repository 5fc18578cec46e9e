#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/pin.hpp"
#include "src/core/system.hpp"
#include "src/device/pin_worker.hpp"
#include "tests/fake_locker.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/temporary_folder.hpp"

/// Registrations that take their time, or never return.
using namespace pinflow;
using namespace pinflow::detail;

namespace {

using std::chrono::milliseconds;

/// A mapped file that records when its last owner has released it.
class watched_file {
 public:
    watched_file(const std::filesystem::path& path, std::uint64_t size_bytes)
        : watched_file(map_pattern(path, size_bytes)) {}

    /// The range with the only owner of the file, which this gives away.
    pin_range range() { return {bytes_, "'x.bin'", std::exchange(owner_, nullptr)}; }
    pin_range unowned_range() const { return {bytes_, "'x.bin'", nullptr}; }
    const std::byte* data() const { return bytes_.data(); }
    bool is_gone() const { return gone_.wait_for(milliseconds(0)) == std::future_status::ready; }
    /// Waits until the thread that hung has released the file.
    void await_gone() const { gone_.wait(); }

 private:
    explicit watched_file(std::shared_ptr<const mapped_file> file) : bytes_(file->bytes()) {
        const auto promise = std::make_shared<std::promise<void>>();
        gone_ = promise->get_future();
        const void* const address = file.get();
        owner_ = std::shared_ptr<const void>(address, [promise, file = std::move(file)](auto) mutable {
            file.reset();
            promise->set_value();
        });
    }

    std::span<const std::byte> bytes_;
    std::shared_ptr<const void> owner_;
    std::future<void> gone_;
};

pin_options impatient(std::uint64_t piece_bytes = page) {
    return {.piece_bytes = piece_bytes, .piece_deadline = milliseconds(500)};
}

}  // namespace

TEST_CASE("pin: a registration that does not return is abandoned, and its memory is not touched") {
    const temporary_folder folder;
    watched_file file(folder / "x.bin", 8 * page);
    fake_locker locker;
    locker.permits = 2;
    pin_registry registry;
    {
        const pin_worker worker({file.range()}, locker, registry, impatient(), &generous);
        CHECK_FALSE(worker.wait());
        CHECK(worker.finished());
        CHECK_FALSE(worker.all_registered());
        CHECK_FALSE(worker.wait_for(file.data() + 4 * page, page, std::chrono::hours(1)));
        CHECK(worker.wait_for(file.data(), 2 * page, std::chrono::hours(1)));
        CHECK(worker.covers(file.data(), 2 * page));
        CHECK_FALSE(worker.covers(file.data() + 2 * page, 1));
        const pin_report report = worker.report();
        CHECK(report.finished);
        CHECK_FALSE(report.complete);
        CHECK(report.failed);
        CHECK(report.registered_bytes == 2 * page);
        CHECK(report.duration >= milliseconds(500));
        CHECK(contains(report.reason, "registered read-only, 8.0 KiB of 32.0 KiB (25 %)"));
        CHECK(
            contains(report.reason,
                     "registering 4096 bytes at offset 8192 of the mapping of 'x.bin' has not returned for"));
    }
    // the destructor has returned: the thread, the mapping and the reservations are still there
    CHECK_FALSE(file.is_gone());
    CHECK(registry.size() == 3);
    CHECK(registry.reserved_bytes() == 8 * page);
    locker.allow(100);
    file.await_gone();
    CHECK(locker.calls == 3);  // nothing was registered after that
    CHECK(locker.locked_bytes() == 0);
    CHECK(locker.strays == 0);
    CHECK(registry.size() == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: a piece that is registered too late does not count, and is unregistered at the end") {
    const temporary_folder folder;
    watched_file file(folder / "x.bin", 4 * page);
    fake_locker locker;
    locker.permits = 1;
    pin_registry registry;
    {
        const pin_worker worker({file.range()}, locker, registry, impatient(), &generous);
        CHECK_FALSE(worker.wait());
        locker.allow(100);
        while (!contains(worker.report().reason, "returned only after"))
            std::this_thread::yield();
        CHECK(locker.locked_bytes() == 2 * page);
        CHECK(worker.report().registered_bytes == page);
        CHECK_FALSE(worker.covers(file.data() + page, 1));
        CHECK_FALSE(worker.wait());
    }
    CHECK(file.is_gone());
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.size() == 0);
}

TEST_CASE("pin: pages that another object cannot finish registering are refused after the deadline") {
    const temporary_folder folder;
    watched_file file(folder / "x.bin", 4 * page);
    fake_locker locker;
    locker.permits = 1;
    pin_registry registry;
    std::optional<pin_worker> stuck(std::in_place, std::vector{file.range()}, locker, registry, impatient(),
                                    &generous);
    CHECK_FALSE(stuck->wait());
    // the stuck registration keeps its mapping alive
    std::optional<pin_worker> second(std::in_place, std::vector{file.unowned_range()}, locker, registry,
                                     impatient(), &generous);
    CHECK_FALSE(second->wait());
    CHECK(second->covers(file.data(), page));
    CHECK_FALSE(second->covers(file.data() + page, 1));
    CHECK(contains(second->report().reason, "another holder has been registering or unregistering"));
    CHECK(locker.call_count() == 2);
    second.reset();
    stuck.reset();
    locker.allow(100);
    file.await_gone();
    CHECK(registry.size() == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: an unregistration that does not return does not hold up the destructor") {
    const temporary_folder folder;
    watched_file file(folder / "x.bin", 4 * page);
    fake_locker locker;
    locker.unlock_permits = 1;
    pin_registry registry;
    {
        const pin_worker worker({file.range()}, locker, registry, impatient(), &generous);
        CHECK(worker.wait());
    }
    CHECK_FALSE(file.is_gone());
    CHECK(registry.reserved_bytes() == 4 * page);
    locker.allow(100);
    file.await_gone();
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: a disk that does not answer is given up like a registration") {
    const temporary_folder folder;
    watched_file file(folder / "x.bin", 4 * page);
    gate disk;
    const system::scoped_failure_hook hook([&](system::call what, std::string_view) {
        if (what == system::call::madvise) disk.wait();
        return system::injected_failure{};
    });
    fake_locker locker;
    pin_registry registry;
    {
        const pin_worker worker({file.range()}, locker, registry, impatient(), &generous);
        CHECK_FALSE(worker.wait());
        CHECK(contains(worker.report().reason,
                       "registered nothing of 16.0 KiB: populating 4096 bytes at offset 0 "
                       "of the mapping of 'x.bin' has not returned for"));
    }
    CHECK_FALSE(file.is_gone());
    disk.open();
    file.await_gone();
    CHECK(locker.calls == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: pages are populated at most three pieces ahead of the one that is registered") {
    const temporary_folder folder;
    constexpr std::size_t pieces = 50;
    const auto file = map_pattern(folder / "x.bin", pieces * page);
    fake_locker locker;
    locker.permits = 0;
    std::atomic<std::size_t> populated = 0;
    std::atomic<std::size_t> max_ahead = 0;
    const system::scoped_failure_hook hook([&](system::call what, std::string_view) {
        if (what != system::call::madvise) return system::injected_failure{};
        const std::lock_guard guard(locker.mutex);
        // while the next piece is awaited, `calls` does not count it yet, so up to four are ahead
        max_ahead = std::max(max_ahead.load(), ++populated - std::max<std::size_t>(locker.calls, 1));
        return system::injected_failure{};
    });
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry, {.piece_bytes = page}, &generous);
    while (populated < 4)
        std::this_thread::yield();  // meanwhile the first one is being registered
    locker.allow(pieces);
    CHECK(worker.wait());
    CHECK(populated == pieces);
    CHECK(max_ahead >= 3);
    CHECK(max_ahead <= 4);
}

TEST_CASE("pin: a range can be waited for while the rest is registered") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * page);
    const std::byte* const data = file->data();
    fake_locker locker;
    locker.permits = 0;
    locker.fail_at_call = 8;
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry, {.piece_bytes = page}, &generous);
    locker.await_waiting();
    CHECK_FALSE(worker.wait_for(data, page, milliseconds(0)));
    CHECK_FALSE(worker.wait_for(data, page, milliseconds(-1)));
    CHECK_FALSE(worker.wait_for(data, page, milliseconds(2)));
    std::thread later([&] { locker.allow(3); });
    CHECK(worker.wait_for(data + page, 2 * page, std::chrono::nanoseconds::max()));
    later.join();
    CHECK_FALSE(worker.finished());
    CHECK_FALSE(worker.wait_for(data, 4 * page, milliseconds(2)));
    locker.allow(100);
    CHECK(worker.wait_for(data, 7 * page, std::chrono::hours(1)));
    CHECK_FALSE(worker.wait_for(data, 8 * page, std::chrono::hours(1)));  // only the eighth piece was refused
}

TEST_CASE("pin: nobody waits for pages that are refused, or do not fit the budget") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * page);
    const std::byte* const data = file->data();
    fake_locker locker;
    locker.permits = 2;
    locker.fail_at_call = 2;
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry,
                            {.budget_bytes = 6 * page, .piece_bytes = page}, &generous);
    CHECK_FALSE(worker.wait_for(data + page, page, std::chrono::hours(1)));      // refused
    CHECK_FALSE(worker.wait_for(data + 7 * page, page, std::chrono::hours(1)));  // beyond the budget
    CHECK_FALSE(worker.wait_for(data + 5 * page, 2 * page, std::chrono::hours(1)));
    CHECK_FALSE(worker.finished());
    CHECK(worker.may_cover(data, page));
    CHECK(worker.may_cover(data + 2 * page, 4 * page));
    CHECK_FALSE(worker.may_cover(data, 2 * page));
    CHECK_FALSE(worker.may_cover(data + 5 * page, 4 * page));  // ends outside
    locker.allow(100);
    CHECK_FALSE(worker.wait());
    CHECK(worker.may_cover(data + 2 * page, 4 * page));
}

TEST_CASE("pin: a forked child leaves everything to its parent") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 4 * page);
    fake_locker locker;
    locker.permits = 1;
    pin_registry registry;
    std::optional<pin_worker> worker(std::in_place, std::vector{range_of(file)}, locker, registry,
                                     pin_options{.piece_bytes = page}, &generous);
    CHECK(worker->wait_for(file->data(), page, std::chrono::hours(1)));
    locker.await_waiting();
    const ::pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        ::alarm(60);
        worker.reset();
        ::_exit(0);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    locker.allow(100);
    CHECK(worker->wait());
    worker.reset();
    CHECK(locker.locked_bytes() == 0);
}
