#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "child_process.hpp"
#include "devices.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/rows.hpp"
#include "segments.hpp"
#include "waiting_child.hpp"

using namespace pinflow;

namespace {

std::span<float> numbers_of(const writable_segment& segment) {
    return {reinterpret_cast<float*>(segment.bytes().data()), segment.bytes().size() / sizeof(float)};
}

}  // namespace

TEST_CASE("writable_segment: begins as zeros, and readers see what is written") {
    const test_segments segments;
    const auto made = writable_segment::create("table", dtype::of<float>(), {100, 8}, segments.folder());
    CHECK(made.shape() == shape_vector{100, 8});
    CHECK(made.dtype() == dtype::of<float>());
    REQUIRE(made.bytes().size() == 100 * 8 * sizeof(float));
    CHECK(std::ranges::all_of(numbers_of(made), [](float number) { return number == 0; }));
    const array reader = segments.open("table");
    numbers_of(made)[17] = 2.5F;
    CHECK(reader.view().as<float>()[17] == 2.5F);
    CHECK(segments.list().front().is_writable);
    CHECK(segments.list().front().checksum.empty());
    CHECK_THROWS_AS(verify_segment("table", segments.folder()), unsupported);
}

TEST_CASE(
    "writable_segment: writing, which changes the time of the file, does not end a loader of the segment") {
    const test_segments segments;
    const auto made = writable_segment::create("table", dtype::of<float>(), {10'000, 64}, segments.folder());
    loader batches({segments.open("table")}, {.device = device::host(), .batch_rows = 100, .epochs = 3});
    const stream stream(device::host());
    std::uint64_t rows = 0;
    auto time = std::filesystem::file_time_type::clock::now();
    while (const auto batch = batches.next(stream)) {
        rows += batch->row_count();
        // as writes to pages that are not mapped yet do
        std::filesystem::last_write_time(segments / "table.npy", time += std::chrono::seconds(1));
        for (std::size_t at = 0; at < numbers_of(made).size(); at += 1024)  // each page
            numbers_of(made)[at] = static_cast<float>(rows);
    }
    CHECK(rows == 30'000);
}

TEST_CASE("writable_segment: outlives its writer, and the next writer finds what was written") {
    const test_segments segments;
    {
        const auto made = writable_segment::create("table", dtype::of<float>(), {4, 2}, segments.folder());
        numbers_of(made)[5] = 7;
    }
    const writable_segment again("table", segments.folder());
    CHECK(numbers_of(again)[5] == 7);
    CHECK(again.shape() == shape_vector{4, 2});
}

TEST_CASE("writable_segment: a second writer is refused until the first has ended") {
    const test_segments segments;
    auto first =
        std::optional(writable_segment::create("table", dtype::of<float>(), {4, 2}, segments.folder()));
    const auto open_again = [&] { return writable_segment("table", segments.folder()); };
    const auto busy = std::errc::device_or_resource_busy;
    CHECK(fails_with(busy, open_again));
    CHECK(holds_in_child([&] { return fails_with(busy, open_again); }));
    CHECK(fails_with(std::errc::file_exists,
                     [&] { writable_segment::create("table", dtype::of<float>(), {1}, segments.folder()); }));
    CHECK_THROWS_WITH_AS(
        writable_segment::create("table", dtype::of<float>(), {1}, segments.folder()),
        doctest::Contains("table.npy': it exists; open it with writable_segment(name), or remove it first"),
        system_failure);
    auto table = std::optional(first->table());
    first.reset();
    CHECK(fails_with(busy, open_again));  // its table still can be written
    table.reset();
    CHECK_NOTHROW(open_again());
}

TEST_CASE("writable_segment: a published segment is not opened for writing") {
    const test_segments segments;
    segments.publish("a", numbered_rows(3));
    CHECK_THROWS_AS(writable_segment("a", segments.folder()), unsupported);
    CHECK(
        fails_with(std::errc::no_such_file_or_directory, [&] { writable_segment("b", segments.folder()); }));
}

TEST_CASE("writable_segment: the lock of a killed writer is free at once") {
    const test_segments segments;
    {
        writable_segment::create("table", dtype::of<float>(), {4, 2}, segments.folder());
    }
    std::optional<writable_segment> held;
    waiting_child writer([&] {
        held.emplace("table", segments.folder());
        return true;
    });
    REQUIRE(writer.is_ready());
    CHECK(fails_with(std::errc::device_or_resource_busy,
                     [&] { writable_segment("table", segments.folder()); }));
    writer.kill();
    CHECK_NOTHROW(writable_segment("table", segments.folder()));
}

TEST_CASE("writable_segment: a child made by fork has neither the lock nor the memory") {
    const test_segments segments;
    auto first =
        std::optional(writable_segment::create("table", dtype::of<float>(), {4, 2}, segments.folder()));
    waiting_child child([] { return true; });
    REQUIRE(child.is_ready());
    first.reset();
    CHECK_NOTHROW(writable_segment("table", segments.folder()));  // the child lives on
    CHECK(holds_in_child([&] {
        // what is not mapped cannot be written to a pipe
        int ends[2] = {-1, -1};
        const writable_segment mapped("table", segments.folder());
        const std::byte* const own = mapped.bytes().data();
        const ::pid_t grandchild = ::fork();
        if (grandchild == 0) {
            const bool gone = ::pipe(ends) == 0 && ::write(ends[1], own, 1) == -1 && errno == EFAULT;
            ::_exit(gone ? 0 : 1);
        }
        int status = 0;
        return ::waitpid(grandchild, &status, 0) == grandchild && status == 0;
    }));
}

TEST_CASE("writable_segment: a child that destroys an inherited segment keeps the lock of its own") {
    const test_segments segments;
    const auto create = [&](const char* name) {
        return writable_segment::create(name, dtype::of<float>(), {4, 2}, segments.folder());
    };
    auto inherited = std::optional(create("a"));
    CHECK(holds_in_child([&] {
        const writable_segment own = create("b");
        inherited.reset();
        return holds_in_child([&] {
            try {
                const writable_segment second("b", segments.folder());
            } catch (const system_failure& failure) {
                return failure.code() == std::errc::device_or_resource_busy;
            }
            return false;
        });
    }));
}

TEST_CASE("writable_segment: rows are scattered into it, and readers see them") {
    on_each_device([](const device& device) {
        const test_segments segments;
        const auto made = writable_segment::create("table", dtype::of<float>(), {50, 4}, segments.folder());
        row_exchange exchange(made.table(), device);
        const stream stream(device);
        const std::vector<std::uint64_t> ids{3, 49, 7};
        std::vector<float> sent(ids.size() * 4);
        for (std::size_t i = 0; i < sent.size(); ++i)
            sent[i] = static_cast<float>(i + 1);
        const device_buffer rows(sent.size() * sizeof(float), stream);
        copy_to_device_async(rows.data(), std::as_bytes(std::span(sent)), stream);
        exchange.scatter_async(ids, rows.data(), duplicate_policy::last, stream);
        stream.synchronize();
        exchange.check();
        const array reader = segments.open("table");
        for (std::size_t i = 0; i < sent.size(); ++i)
            CHECK(reader.view().as<float>()[4 * ids[i / 4] + i % 4] == sent[i]);
    });
}

TEST_CASE("writable_segment: an array without axes has no table, and a moved-from segment no rows") {
    const test_segments segments;
    auto scalar = writable_segment::create("scalar", dtype::of<float>(), {}, segments.folder());
    CHECK(scalar.bytes().size() == sizeof(float));
    CHECK_THROWS_AS(scalar.table(), unsupported);
    const writable_segment moved = std::move(scalar);
    CHECK(moved.bytes().size() == sizeof(float));
    CHECK(scalar.bytes().empty());  // NOLINT(bugprone-use-after-move)
    CHECK_THROWS_AS(scalar.table(), invalid_argument);
}
