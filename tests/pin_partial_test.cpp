#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/pin.hpp"
#include "src/device/pin_worker.hpp"
#include "tests/fake_locker.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

/// Ranges of which only a part can be registered, or only a part is requested.
using namespace pinflow;
using namespace pinflow::detail;

namespace {

using piece_numbers = std::vector<std::ptrdiff_t>;

pin_worker::machine_answers with_a_mebibyte() {
    memory_limits limits;
    limits.locked_bytes = mebibyte;
    return {limits, read_own_maps()};
}

pin_options pieces_of(std::uint64_t pages) {
    return {.piece_bytes = pages * page};
}

/// "0.02 s" and the like as "T s".
std::string without_time(std::string reason) {
    const std::size_t end = reason.find(" s:");
    if (end == std::string::npos) return reason;
    const std::size_t begin = reason.rfind(' ', end - 1) + 1;
    return reason.replace(begin, end - begin, "T");
}

}  // namespace

// ---- the budget ------------------------------------------------------------------------------------------

TEST_CASE("pin: a file that is 5 % over the budget has 95 % of its pages registered") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 20 * page);
    fake_locker locker;
    pin_registry registry;
    {
        const pin_worker worker({range_of(file)}, locker, registry,
                                {.budget_bytes = 19 * page, .piece_bytes = page}, &generous);
        CHECK_FALSE(worker.wait());
        CHECK(worker.registered_prefix_bytes() == 19 * page);
        CHECK_FALSE(worker.all_registered());
        CHECK(registry.reserved_bytes() == 19 * page);
        const pin_report report = worker.report();
        CHECK(report.finished);
        CHECK_FALSE(report.complete);
        CHECK(report.failed);
        CHECK(report.registered_bytes == 19 * page);
        CAPTURE(report.reason);
        CHECK(contains_all(without_time(report.reason),
                           {"registered read-only", "76.0 KiB of 80.0 KiB (95 %), T s:", "budget of 76.0 KiB",
                            "is used up", "budget that was set"}));
        CHECK_FALSE(contains(report.reason, "other objects"));
    }
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: pages registered in place get what pinned buffers leave of a budget that was set") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 20 * page);
    fake_locker locker;
    pin_registry registry;
    registry.add_buffer(4 * page);
    const pin_options options{.budget_bytes = 19 * page, .piece_bytes = page};
    {
        const pin_worker worker({range_of(file)}, locker, registry, options, &generous);
        CHECK_FALSE(worker.wait());
        CHECK(worker.registered_prefix_bytes() == 15 * page);
        CHECK(contains_all(worker.report().reason, {"budget of 60.0 KiB", "16.0 KiB of pinned buffers"}));
    }
    registry.remove_buffer(4 * page);
    const pin_worker worker({range_of(file)}, locker, registry, options, &generous);
    CHECK_FALSE(worker.wait());
    CHECK(worker.registered_prefix_bytes() == 19 * page);
}

TEST_CASE("pin: RLIMIT_MEMLOCK bounds what is registered only on request") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 2 * mebibyte);
    fake_locker locker;
    pin_registry registry;
    pin_options strict = pieces_of(64);
    strict.limit = pin_limit::memlock;
    const pin_worker bounded({range_of(file)}, locker, registry, strict, &with_a_mebibyte);
    CHECK_FALSE(bounded.wait());
    CHECK(bounded.report().registered_bytes == mebibyte);
    CHECK(contains(bounded.report().reason, "RLIMIT_MEMLOCK"));
    const pin_worker unbounded({range_of(file)}, locker, registry, pieces_of(64), &with_a_mebibyte);
    CHECK(unbounded.wait());
    // pages that are registered already cost nothing
    const pin_worker same({range_of(file)}, locker, registry, strict, &with_a_mebibyte);
    CHECK(same.wait());
}

TEST_CASE("pin: other registrations reduce the budget, and the reason says so") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 2 * mebibyte);
    const auto other = map_pattern(folder / "y.bin", 2 * mebibyte);
    fake_locker locker;
    pin_registry registry;
    const pin_options options{.budget_bytes = 3 * mebibyte, .piece_bytes = mebibyte};
    const pin_worker first({range_of(file)}, locker, registry, options, &generous);
    CHECK(first.wait());
    const pin_worker second({range_of(other)}, locker, registry, options, &generous);
    CHECK_FALSE(second.wait());
    CAPTURE(second.report().reason);
    CHECK(contains_all(without_time(second.report().reason),
                       {"registered read-only", "1.0 MiB of 2.0 MiB (50 %), T s:", "budget of 3.0 MiB",
                        "is used up", "other objects of this process hold 2.0 MiB", "budget that was set"}));
    const auto third = map_pattern(folder / "z.bin", mebibyte);
    const pin_worker none({range_of(third)}, locker, registry, options, &generous);
    CHECK_FALSE(none.wait());
    CAPTURE(none.report().reason);
    CHECK(contains_all(none.report().reason,
                       {"registered nothing of 1.0 MiB", "budget of 3.0 MiB", "is used up",
                        "other objects of this process hold 3.0 MiB", "budget that was set"}));
    CHECK_FALSE(contains(none.report().reason, "too small"));
}

TEST_CASE("pin: a budget below one piece registers nothing, and the reason says so") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", mebibyte);
    fake_locker locker;
    pin_registry registry;
    const pin_options options{.budget_bytes = mebibyte / 2, .piece_bytes = mebibyte};
    const pin_worker worker({range_of(file)}, locker, registry, options, &generous);
    CHECK_FALSE(worker.wait());
    CHECK(locker.calls == 0);
    CAPTURE(worker.report().reason);
    CHECK(contains_all(worker.report().reason, {"registered nothing of 1.0 MiB", "budget of 512.0 KiB",
                                                "too small for the first piece", "budget that was set"}));
    CHECK_FALSE(contains(worker.report().reason, "other objects"));
}

TEST_CASE("pin: a budget below 16 pieces has smaller pieces") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * mebibyte);
    fake_locker locker;
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry, {.budget_bytes = 5 * mebibyte}, &generous);
    CHECK_FALSE(worker.wait());
    CHECK(worker.report().registered_bytes == 5 * mebibyte);
}

TEST_CASE("pin: without allow_partial, nothing of a file above the budget is registered") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 4 * mebibyte);
    fake_locker locker;
    pin_registry registry;
    pin_options options{.budget_bytes = 3 * mebibyte, .allow_partial = false, .piece_bytes = mebibyte};
    const pin_worker worker({range_of(file)}, locker, registry, options, &generous);
    CHECK_FALSE(worker.wait());
    CHECK(locker.calls == 0);
    CHECK(registry.reserved_bytes() == 0);
    CAPTURE(worker.report().reason);
    CHECK(contains_all(worker.report().reason, {"registered nothing of 4.0 MiB", "budget of 3.0 MiB",
                                                "too small for all pages", "budget that was set"}));
    CHECK_FALSE(contains(worker.report().reason, "other objects"));
    options.budget_bytes = 4 * mebibyte;
    const pin_worker fits({range_of(file)}, locker, registry, options, &generous);
    CHECK(fits.wait());
}

// ---- refusals --------------------------------------------------------------------------------------------

TEST_CASE("pin: a piece that cannot be registered leaves the others registered") {
    const temporary_folder folder;
    const auto first = map_pattern(folder / "a.bin", 4 * page);
    const auto second = map_pattern(folder / "b.bin", 4 * page);
    fake_locker locker;
    locker.fail_at_call = 2;
    pin_registry registry;
    const pin_worker worker({range_of(first), range_of(second)}, locker, registry, pieces_of(2), &generous);
    CHECK_FALSE(worker.wait());
    CHECK(locker.calls == 4);
    CHECK(worker.registered_prefix_bytes() == 2 * page);
    CHECK(worker.covers(first->data(), 2 * page));
    CHECK_FALSE(worker.covers(first->data() + 2 * page, 1));
    CHECK(worker.covers(second->data(), 4 * page));
    CHECK(worker.report().registered_bytes == 6 * page);
    CAPTURE(worker.report().reason);
    CHECK(contains_all(
        without_time(worker.report().reason),
        {"registered read-only", "24.0 KiB of 32.0 KiB (75 %), T s:", "cannot register 8192 bytes",
         "offset 8192 of the mapping of 'x.bin'", "cudaErrorMemoryAllocation (out of memory)"}));
    CHECK_FALSE(contains(worker.report().reason, "more failure"));
}

TEST_CASE("pin: without allow_partial, registering ends at the first piece that is refused") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * page);
    fake_locker locker;
    locker.fail_at_call = 2;
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry, {.allow_partial = false, .piece_bytes = page},
                            &generous);
    CHECK_FALSE(worker.wait());
    CHECK(locker.calls == 2);
    CHECK(worker.report().registered_bytes == page);
}

TEST_CASE("pin: a refusal that applies to all pages of a kind ends the attempts for that kind only") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 40 * page);
    const auto memory = std::make_shared<memory_region>(memory_region::anonymous(40 * page));
    fake_locker locker;
    locker.refuse = [](std::span<const std::byte>, bool read_only) { return read_only; };
    locker.refuses_all = true;
    pin_registry registry;
    const pin_worker worker({range_of(file), {memory->bytes(), "an array in memory", memory}}, locker,
                            registry, pieces_of(1), &generous);
    CHECK_FALSE(worker.wait());
    CHECK(locker.calls == 41);
    CHECK_FALSE(worker.covers(file->data(), 1));
    CHECK(worker.covers(memory->data(), 40 * page));
    CHECK(contains(worker.report().reason, "registered, 160.0 KiB of 320.0 KiB (50 %)"));
    CHECK_FALSE(contains(worker.report().reason, "more failure"));
}

TEST_CASE("pin: after 16 refusals the rest is not tried") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 100 * page);
    fake_locker locker;
    locker.refuse = [&](std::span<const std::byte> pages, bool) {
        return pages.data() >= file->data() + 50 * page;  // as of a file that has lost half of its pages
    };
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry, pieces_of(1), &generous);
    CHECK_FALSE(worker.wait());
    CHECK(locker.calls == 50 + 16);
    CHECK(worker.registered_prefix_bytes() == 50 * page);
    CHECK(contains(worker.report().reason, "(50 %)"));
    CHECK(contains(worker.report().reason,
                   "offset 204800 of the mapping of 'x.bin': cudaErrorMemoryAllocation"));
    CHECK(contains(worker.report().reason, "(and 15 more failures, after which the rest was not tried)"));
}

TEST_CASE("pin: an array whose last page may hold other memory is not registered") {
    memory_region memory = memory_region::anonymous(12 * page);
    const auto registers = [&](std::uint64_t begin, std::uint64_t size_bytes) {
        fake_locker locker;
        pin_registry registry;
        const pin_worker worker({{memory.bytes().subspan(begin, size_bytes), "an array in memory", nullptr}},
                                locker, registry, {}, &generous);
        const bool all = worker.wait();
        CHECK(contains(worker.report().reason, "other memory of the process may begin in its last page") !=
              all);
        CHECK((locker.calls > 0) == all);
        return all;
    };
    // as in the heap: more memory of the process follows
    CHECK_FALSE(registers(100, 8 * page));
    CHECK_FALSE(registers(100, 100));
    CHECK(registers(100, 8 * page - 100));
    // the array ends in the last page of its mapping, but the next mapping continues the memory
    REQUIRE(::madvise(memory.data(), 9 * page, MADV_DONTDUMP) == 0);
    CHECK_FALSE(registers(100, 9 * page - 200));
    // the mapping ends with this page, so memory that begins in it also ends in it
    REQUIRE(::mprotect(memory.data() + 10 * page, 2 * page, PROT_NONE) == 0);
    CHECK(registers(0, 10 * page - 100));
}

TEST_CASE("pin: a range that must not be registered leaves the others registered") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 4 * page);
    const pinflow::descriptor_lease lease = file->file()->lease_descriptor();
    void* const mapped = ::mmap(nullptr, 4 * page, PROT_READ, MAP_PRIVATE, lease.get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    fake_locker locker;
    pin_registry registry;
    {
        const pin_range copied{{static_cast<const std::byte*>(mapped), 4 * page}, "'private'", {}};
        const pin_worker worker({copied, range_of(file)}, locker, registry, pieces_of(1), &generous);
        CHECK_FALSE(worker.wait());
        CHECK(worker.covers(file->data(), 4 * page));
        CHECK(registry.reserved_bytes() == 4 * page);
        CHECK(contains(worker.report().reason, "(50 %)"));
        CHECK(
            contains(worker.report().reason, "cannot register 'private': it is a private mapping of a file"));
        CHECK_FALSE(contains(worker.report().reason, "more failure"));
        const pin_worker strict({range_of(file), copied}, locker, registry, {.allow_partial = false},
                                &generous);
        CHECK_FALSE(strict.wait());
        CHECK(strict.report().registered_bytes == 0);
    }
    ::munmap(mapped, 4 * page);
}

// ---- the order -------------------------------------------------------------------------------------------

TEST_CASE("pin: runs and the prefix tell which pieces are registered") {
    const temporary_folder folder;
    // 9 pieces of 2 pages, and a tenth piece of one page; the bytes begin within the first page
    const auto file = map_pattern(folder / "x.bin", 19 * page, 100);
    const std::byte* const data = file->data();
    const auto piece_at = [&](std::uint64_t index) { return data - 100 + index * 2 * page; };
    pin_registry registry;
    fake_locker locker;
    locker.refuse = [&](std::span<const std::byte> pages, bool) {
        return pages.data() != piece_at(2) && pages.data() != piece_at(9);
    };
    pin_worker worker({range_of(file)}, locker, registry, {.piece_bytes = 2 * page}, &generous);
    CHECK_FALSE(worker.wait());
    CHECK(worker.covers(piece_at(2), 2 * page));
    CHECK_FALSE(worker.covers(data, 1));
    CHECK_FALSE(worker.covers(piece_at(2) - 1, 2));
    CHECK_FALSE(worker.covers(piece_at(2), 2 * page + 1));
    const pin_run before = worker.run_at(data, 5 * page);
    CHECK_FALSE(before.registered);
    CHECK(before.size_bytes == 4 * page - 100);
    const pin_run within = worker.run_at(piece_at(2) + 1, 6 * page);
    CHECK(within.registered);
    CHECK(within.size_bytes == 2 * page - 1);
    const pin_run last = worker.run_at(piece_at(9), 100 * page);
    CHECK(last.registered);
    CHECK(worker.registered_prefix_bytes() == 0);
    CHECK(worker.report().registered_bytes == 3 * page);
}

TEST_CASE("pin order: pieces are taken from the front while nobody reads") {
    pin_order order(4, false);
    for (const std::size_t expected : {0U, 1U, 2U, 3U}) {
        const auto step = order.take({});
        REQUIRE(step);
        CHECK(step->index == expected);
        CHECK(step->is_ahead);
    }
    CHECK_FALSE(order.take({}));
    CHECK(order.empty());
}

TEST_CASE("pin order: the nearer a reader is, the more pieces are skipped, and skipped pieces come last") {
    std::vector<std::size_t> taken;
    pin_order order(30, true);
    while (const auto step = order.take(0))
        taken.push_back(step->index);
    // two of three are skipped at first, then every other one, then none
    CHECK(std::vector(taken.begin(), taken.begin() + 8) ==
          std::vector<std::size_t>{2, 5, 8, 10, 12, 14, 16, 17});
    CHECK(taken.size() == 30);
    CHECK(std::ranges::find(taken, 29) < std::ranges::find(taken, 9));
    CHECK(taken.back() == 7);
    pin_order wanted_ahead(30, false);
    std::size_t count = 0;
    while (wanted_ahead.take(20))
        ++count;
    CHECK(count == 5);  // 21, 24, 27, 29, then 28
    pin_order passed(10, true);
    passed.leave_out([](std::size_t index) { return index != 3; });
    CHECK(passed.is_passed(7, 8));
    CHECK_FALSE(passed.is_passed(8, 8));
    CHECK_FALSE(passed.is_passed(7, {}));
    passed.put_back(1);
    CHECK(passed.take(8)->index == 1);
    CHECK_FALSE(passed.take(8)->is_ahead);
}

TEST_CASE("pin order: what is left out is asked from the piece to begin at on, then from the front") {
    pin_order order(10, false, 6);
    std::vector<std::size_t> asked;
    order.leave_out([&](std::size_t index) {
        asked.push_back(index);
        return asked.size() > 5;
    });
    CHECK(asked == std::vector<std::size_t>{6, 7, 8, 9, 0, 1, 2, 3, 4, 5});
    for (const std::size_t expected : {6U, 7U, 8U, 9U, 0U})
        CHECK(order.take({})->index == expected);
    CHECK(order.empty());
}

TEST_CASE("pin order: after a reader restarts, skipped pieces are registered ahead of it") {
    pin_order order(100, true);
    for (std::size_t reader = 0; reader < 99; reader += 3)
        order.take(reader);
    order.take(97);  // a thread that lags behind is no new beginning
    CHECK(order.take(99)->is_ahead == false);
    const auto step = order.take(2);
    REQUIRE(step);
    CHECK(step->is_ahead);
    CHECK(step->index > 2);
    CHECK(step->index < 12);
}

TEST_CASE("pin order: a reader faster than registration finds most pieces registered in time") {
    // the number of pieces read while one is registered, with three more already taken
    for (const double read_per_piece : {1.3, 2.0, 2.5}) {
        CAPTURE(read_per_piece);
        constexpr std::size_t count = 600;
        pin_order order(count, false);
        std::vector<bool> is_there(count, false);
        std::deque<std::size_t> under_way;
        std::size_t found = 0;
        std::size_t longest_gap = 0;
        std::size_t gap = 0;
        double next_done = read_per_piece;
        for (std::size_t reader = 0; reader < count; ++reader) {
            if (is_there[reader]) ++found;
            gap = is_there[reader] ? 0 : gap + 1;
            if (reader > 40) longest_gap = std::max(longest_gap, gap);
            for (; static_cast<double>(reader) >= next_done; next_done += read_per_piece) {
                while (under_way.size() < 4) {
                    const auto step = order.take(reader);
                    if (!step) break;
                    under_way.push_back(step->index);
                }
                if (under_way.empty()) break;
                is_there[under_way.front()] = true;
                under_way.pop_front();
            }
        }
        CHECK(static_cast<double>(found) > 0.9 * count / read_per_piece);
        CHECK(longest_gap <= 2);  // those that are missing are spread evenly
    }
}

TEST_CASE("pin: the budget goes to the pieces that come first") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 6 * page);
    fake_locker locker;
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry,
                            {.budget_bytes = 4 * page, .piece_bytes = page}, &generous);
    CHECK_FALSE(worker.wait());
    CHECK(locked_pieces(locker, file->bytes(), page) == piece_numbers{0, 1, 2, 3});
}

TEST_CASE("pin: pieces that a reader has passed are registered last, from the front") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * page);
    const auto other = map_pattern(folder / "y.bin", 2 * page);
    pin_registry registry;
    fake_locker locker;
    locker.permits = 0;
    pin_worker worker({range_of(file), range_of(other)}, locker, registry, pieces_of(1), &generous);
    locker.await_waiting();  // for the first piece
    worker.set_reader_position(file->data() + 5 * page + 1);
    worker.set_reader_position(other->data());
    worker.set_reader_position(nullptr);
    locker.allow(100);
    CHECK(worker.wait());
    std::vector<const std::byte*> order;
    for (const auto& pages : locker.locked)
        order.push_back(pages.data());
    REQUIRE(order.size() == 10);
    CHECK(order.front() == file->data());
    for (const std::uint64_t index : {1U, 2U, 3U, 4U}) {
        const auto at = std::ranges::find(order, file->data() + index * page);
        const auto last_ahead = std::ranges::find(order, other->data() + page);
        CHECK(at > last_ahead);
        if (index > 1) CHECK(at > std::ranges::find(order, file->data() + (index - 1) * page));
    }
    CHECK(locker.yield_count > 0);
}

TEST_CASE("pin: passed pieces are left out if the rest is not requested, which is no failure") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 10 * page);
    pin_registry registry;
    fake_locker locker;
    locker.permits = 0;
    pin_worker worker({range_of(file)}, locker, registry, {.piece_bytes = page, .registers_rest = false},
                      &generous);
    locker.await_waiting();
    worker.set_reader_position(file->data() + 8 * page);
    locker.allow(100);
    CHECK_FALSE(worker.wait());
    const auto locked = locked_pieces(locker, file->bytes(), page);
    CHECK(locked.front() == 0);
    for (const auto piece : locked)
        CHECK((piece == 0 || piece >= 8));
    const pin_report report = worker.report();
    CHECK(report.finished);
    CHECK_FALSE(report.complete);
    CHECK_FALSE(report.failed);
    CHECK(contains(report.reason, "the reader had passed"));
}
