#include "src/device/pin_registry.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/fake_locker.hpp"

using namespace pinflow;
using namespace pinflow::detail;

namespace {

std::string acquire(pin_registry& registry, fake_locker& locker, std::span<const std::byte> pages,
                    pin_registry::holds& held) {
    const auto refusal = registry.acquire(locker, pages, true, nullptr, held);
    return refusal ? refusal->reason : std::string();
}

}  // namespace

TEST_CASE("pin: pages that two holders share are registered once, until the last holder releases them") {
    const auto memory = memory_region::anonymous(16 * page);
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds first;
    pin_registry::holds second;
    REQUIRE(acquire(registry, locker, pages_at(memory, 0, 8), first).empty());
    REQUIRE(acquire(registry, locker, pages_at(memory, 4, 8), second).empty());
    CHECK(locker.calls == 2);
    CHECK(locker.locked_bytes() == 12 * page);
    SUBCASE("the first goes first") {
        registry.release(first);
        CHECK(locker.locked_bytes() == 12 * page);  // still whole: the second holds its last pages
        registry.release(second);
    }
    SUBCASE("the second goes first") {
        registry.release(second);
        CHECK(locker.locked_bytes() == 8 * page);
        registry.release(first);
    }
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.size() == 0);
    CHECK(locker.strays == 0);
}

TEST_CASE("pin: a request that bridges registered pages registers only the gaps") {
    const auto memory = memory_region::anonymous(16 * page);
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds held;
    REQUIRE(acquire(registry, locker, pages_at(memory, 2, 2), held).empty());
    REQUIRE(acquire(registry, locker, pages_at(memory, 6, 2), held).empty());
    pin_registry::holds all;
    REQUIRE(acquire(registry, locker, pages_at(memory, 0, 16), all).empty());
    CHECK(locker.locked_bytes() == 16 * page);
    CHECK(locker.calls == 5);
    CHECK(all.size() == 5);
    registry.release(all);
    CHECK(locker.locked_bytes() == 4 * page);
    registry.release(held);
    CHECK(locker.locked_bytes() == 0);
}

TEST_CASE("pin: a failed request leaves nothing behind") {
    const auto memory = memory_region::anonymous(16 * page);
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds held;
    REQUIRE(acquire(registry, locker, pages_at(memory, 4, 2), held).empty());
    locker.fail_at_call = 3;  // the gap behind the pages held
    pin_registry::holds failed;
    CHECK(contains(acquire(registry, locker, pages_at(memory, 0, 16), failed), "out of memory"));
    CHECK(failed.empty());
    CHECK(locker.locked_bytes() == 2 * page);
    registry.release(held);
    CHECK(registry.size() == 0);
}

TEST_CASE(
    "pin: the owner is kept alive until its pages are unregistered, even if another holder is the last") {
    auto memory = std::make_shared<memory_region>(memory_region::anonymous(4 * page));
    const std::weak_ptr<memory_region> watched = memory;
    const std::span<const std::byte> pages = memory->bytes();
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds first;
    pin_registry::holds second;
    REQUIRE_FALSE(registry.acquire(locker, pages, true, memory, first));
    REQUIRE_FALSE(registry.acquire(locker, pages.first(page), true, nullptr, second));
    memory.reset();
    registry.release(first);
    CHECK_FALSE(watched.expired());
    registry.release(second);
    CHECK(watched.expired());
    CHECK(locker.locked_bytes() == 0);
}

TEST_CASE("pin: threads that ask for the same pages at the same time register each once") {
    const auto memory = memory_region::anonymous(64 * page);
    fake_locker locker;
    pin_registry registry;
    std::atomic<unsigned> failures = 0;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            for (unsigned round = 0; round < 200; ++round) {
                pin_registry::holds held;
                if (!acquire(registry, locker, pages_at(memory, (t * 7 + round) % 32, 24), held).empty())
                    ++failures;
                registry.release(held);
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(failures == 0);
    CHECK(locker.locked_bytes() == 0);
    CHECK(locker.strays == 0);
    CHECK(registry.size() == 0);
}

TEST_CASE("pin: the budget is shared by all holders") {
    pin_registry registry;
    const memory_region memory = memory_region::anonymous(32 * page);
    CHECK(registry.reserve(pages_at(memory, 0, 6), 10 * page));
    CHECK_FALSE(registry.reserve(pages_at(memory, 6, 5), 10 * page));
    CHECK(registry.reserve(pages_at(memory, 6, 4), 10 * page));
    CHECK_FALSE(registry.reserve(pages_at(memory, 10, 1), 5 * page));  // less than is reserved already
    registry.give_back(pages_at(memory, 0, 6));
    CHECK(registry.reserved_bytes() == 4 * page);
    CHECK(registry.reserve(pages_at(memory, 0, 6), 10 * page));
    CHECK(registry.reserve({}, 0));
}

TEST_CASE("pin: pages that several holders reserve count once, until the last has given them back") {
    pin_registry registry;
    const memory_region memory = memory_region::anonymous(32 * page);
    const auto pages = [&](std::uint64_t first, std::uint64_t count) {
        return pages_at(memory, first, count);
    };
    CHECK(registry.reserve(pages(0, 8), 10 * page));
    CHECK(registry.reserve(pages(0, 8), 10 * page));
    CHECK(registry.reserve(pages(2, 3), page));  // nothing new, whatever the budget
    CHECK(registry.reserved_bytes() == 8 * page);
    CHECK_FALSE(registry.reserve(pages(6, 5), 10 * page));
    CHECK(registry.reserve(pages(6, 4), 10 * page));
    CHECK(registry.reserved_bytes() == 10 * page);
    registry.give_back(pages(0, 8));
    CHECK(registry.reserved_bytes() == 10 * page);
    registry.give_back(pages(0, 8));
    CHECK(registry.reserved_bytes() == 7 * page);
    registry.give_back(pages(2, 3));
    registry.give_back(pages(6, 4));
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: reservations of overlapping ranges have the same size as a count page by page") {
    constexpr std::uint64_t page_count = 64;
    constexpr std::uint64_t budget_pages = 40;
    const memory_region memory = memory_region::anonymous(page_count * page);
    pin_reservations reservations;
    std::array<unsigned, page_count> holders{};
    struct reservation {
        std::uint64_t first;
        std::uint64_t count;
    };
    std::vector<reservation> made;
    std::mt19937_64 random(1);
    bool counts_agree = true;
    unsigned refusals = 0;
    for (unsigned step = 0; step < 20'000; ++step) {
        if (made.empty() || random() % 2 == 0) {
            const std::uint64_t first = random() % page_count;
            const reservation wanted{first, random() % std::min<std::uint64_t>(page_count - first, 12) + 1};
            const auto begin = holders.begin() + static_cast<std::ptrdiff_t>(first);
            const auto end = begin + static_cast<std::ptrdiff_t>(wanted.count);
            const auto in_use = page_count - static_cast<std::uint64_t>(std::ranges::count(holders, 0U));
            const auto added = static_cast<std::uint64_t>(std::count(begin, end, 0U));
            const bool fits = added == 0 || in_use + added <= budget_pages;
            const bool reserved =
                reservations.add(pages_at(memory, first, wanted.count), budget_pages * page);
            counts_agree = counts_agree && reserved == fits;
            refusals += reserved ? 0 : 1;
            if (!reserved) continue;
            made.push_back(wanted);
            std::for_each(begin, end, [](unsigned& count) { ++count; });
        } else {
            std::swap(made[random() % made.size()], made.back());
            const auto [first, count] = made.back();
            made.pop_back();
            reservations.remove(pages_at(memory, first, count));
            for (std::uint64_t i = first; i < first + count; ++i)
                --holders[i];
        }
        const auto in_use = page_count - static_cast<std::uint64_t>(std::ranges::count(holders, 0U));
        counts_agree = counts_agree && reservations.size_bytes() == in_use * page;
    }
    CHECK(counts_agree);
    CHECK(refusals > 100);
    for (const auto& [first, count] : made)
        reservations.remove(pages_at(memory, first, count));
    CHECK(reservations.size_bytes() == 0);
}

TEST_CASE("pin: a hundred holders can reserve thousands of pieces") {
    // The addresses are never accessed. If reserve() copied all reservations on each call, this test would
    // time out.
    constexpr std::uintptr_t begin = std::uintptr_t{1} << 40;
    constexpr std::uint64_t pieces = 8192;
    const auto piece_at = [](std::uint64_t index) {
        return std::span(reinterpret_cast<const std::byte*>(begin + index * mebibyte), mebibyte);
    };
    pin_registry registry;
    for (unsigned holder = 0; holder < 100; ++holder) {
        for (std::uint64_t index = 0; index < pieces; ++index)
            registry.reserve(piece_at(index), 5000 * mebibyte);
    }
    CHECK(registry.reserved_bytes() == 5000 * mebibyte);
    for (unsigned holder = 0; holder < 100; ++holder) {
        for (std::uint64_t index = 0; index < 5000; ++index)
            registry.give_back(piece_at(index));
    }
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: the registry detects ranges that overlap a registration") {
    fake_locker locker;
    pin_registry registry;
    const memory_region memory = memory_region::anonymous(32 * page);
    pin_registry::holds held;
    REQUIRE(acquire(registry, locker, pages_at(memory, 4, 2), held).empty());
    CHECK(registry.knows(pages_at(memory, 0, 5)));
    CHECK(registry.knows(pages_at(memory, 5, 10)));
    CHECK(registry.knows(pages_at(memory, 0, 20)));
    CHECK(registry.knows(pages_at(memory, 4, 1)));
    CHECK_FALSE(registry.knows(pages_at(memory, 0, 4)));
    CHECK_FALSE(registry.knows(pages_at(memory, 6, 4)));
    registry.release(held);
    CHECK_FALSE(registry.knows(pages_at(memory, 0, 20)));
}

TEST_CASE("pin: copies are cut where one registration ends, and stay apart") {
    const auto memory = memory_region::anonymous(8 * page);
    auto device_memory = memory_region::anonymous(8 * page);
    std::byte* const to = device_memory.data();
    const std::byte* const from = memory.data();
    fake_locker locker;
    pin_registry registry;
    std::vector<copy_range> pieces;
    const std::vector<copy_range> rows{{to, from + 100, 1000},
                                       {to + 1000, from + 1100, 3000},
                                       {to + 4000, from, 0},
                                       {to + 4000, from + 4100, 5000},
                                       {to + 9000, from, 100}};
    SUBCASE("nothing registered") {
        registry.cut(rows, pieces);
        REQUIRE(pieces.size() == 4);  // neighbours may lie in two allocations of the device
        CHECK(pieces[0].size_bytes == 1000);
        CHECK(pieces[1].size_bytes == 3000);
        CHECK(pieces[3].source == from);
    }
    SUBCASE("two registrations, and pages that are in neither") {
        pin_registry::holds held;
        REQUIRE(acquire(registry, locker, pages_at(memory, 0, 1), held).empty());
        REQUIRE(acquire(registry, locker, pages_at(memory, 1, 1), held).empty());
        registry.cut(rows, pieces);
        REQUIRE(pieces.size() == 6);
        CHECK(pieces[0].size_bytes == 1000);
        CHECK(pieces[1].size_bytes == page - 1100);
        CHECK(pieces[2].source == from + page);
        CHECK(pieces[2].destination == to + page - 100);
        CHECK(pieces[2].size_bytes == 4100 - page);
        CHECK(pieces[3].size_bytes == 2 * page - 4100);
        CHECK(pieces[4].source == from + 2 * page);
        CHECK(pieces[4].size_bytes == 9100 - 2 * page);
        CHECK(pieces[5].size_bytes == 100);
        registry.release(held);
    }
}

TEST_CASE("pin: pages that cannot be unlocked stay mapped until a later release unlocks them") {
    pin_registry registry;
    fake_locker locker;
    locker.unlocks = false;
    auto memory = std::make_shared<const memory_region>(memory_region::anonymous(page));
    pin_registry::holds held;
    REQUIRE_FALSE(registry.acquire(locker, memory->bytes(), false, memory, held));
    const std::weak_ptr<const memory_region> still_there = memory;
    memory.reset();
    registry.release(held);
    CHECK_FALSE(still_there.expired());
    // a new request for them succeeds, and may be able to unlock them
    locker.unlocks = true;
    held.clear();
    const auto again = still_there.lock()->bytes();
    REQUIRE_FALSE(registry.acquire(locker, again, false, nullptr, held));
    registry.release(held);
    CHECK(still_there.expired());
    CHECK(locker.calls == 1);
}

TEST_CASE("pin: an exception of the locker becomes the reason, and leaves nothing busy") {
    struct throwing_locker final : page_locker {
        std::optional<pin_refusal> lock(std::span<const std::byte>, bool) override {
            throw device_error("it went away");
        }
        bool unlock(std::span<const std::byte>) noexcept override { return true; }
        void yield_driver() noexcept override {}
    };
    pin_registry registry;
    throwing_locker throwing;
    fake_locker locker;
    const auto memory = memory_region::anonymous(4 * page);
    pin_registry::holds held;
    const auto refusal = registry.acquire(throwing, memory.bytes(), false, nullptr, held);
    REQUIRE(refusal);
    CHECK(refusal->reason == "it went away");
    CHECK_FALSE(refusal->same_for_others);
    CHECK(held.empty());
    CHECK(registry.size() == 0);
    CHECK(acquire(registry, locker, memory.bytes(), held).empty());
    registry.release(held);
}

TEST_CASE("pin: refused pages that may still be registered stay mapped") {
    struct half_locker final : page_locker {
        std::optional<pin_refusal> lock(std::span<const std::byte>, bool) override {
            return pin_refusal{.reason = "half way", .may_be_locked = true};
        }
        bool unlock(std::span<const std::byte>) noexcept override { return false; }
        void yield_driver() noexcept override {}
    };
    pin_registry registry;
    half_locker locker;
    auto memory = std::make_shared<memory_region>(memory_region::anonymous(4 * page));
    const std::weak_ptr<memory_region> still_there = memory;
    pin_registry::holds held;
    const std::span<const std::byte> pages = memory->bytes();
    CHECK(registry.acquire(locker, pages, false, memory, held));
    CHECK(held.empty());
    CHECK(registry.size() == 0);
    memory.reset();
    CHECK_FALSE(still_there.expired());
}

TEST_CASE("pin: pages that another holder is registering for too long are refused") {
    const auto memory = memory_region::anonymous(8 * page);
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds front;
    REQUIRE(acquire(registry, locker, pages_at(memory, 0, 2), front).empty());
    locker.permits = 0;
    pin_registry::holds stuck;
    std::string stuck_reason = "not back yet";
    std::thread other([&] { stuck_reason = acquire(registry, locker, pages_at(memory, 2, 2), stuck); });
    locker.await_waiting();
    pin_registry::holds held;
    const auto refusal =
        registry.acquire(locker, pages_at(memory, 0, 4), true, nullptr, held, std::chrono::milliseconds(5));
    REQUIRE(refusal);
    CHECK(contains(refusal->reason, "another holder has been registering"));
    CHECK(refusal->same_for_others);
    CHECK(held.empty());
    locker.allow(10);
    other.join();
    CHECK(stuck_reason.empty());
    CHECK(locker.locked_bytes() == 4 * page);
    registry.release(front);
    CHECK(locker.locked_bytes() == 2 * page);  // the refused request left nothing behind
    CHECK(acquire(registry, locker, pages_at(memory, 2, 2), held).empty());
    registry.release(held);
    registry.release(stuck);
    CHECK(registry.size() == 0);
}
