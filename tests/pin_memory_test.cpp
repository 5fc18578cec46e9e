#include <doctest/doctest.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <optional>

#include "pinflow/memory.hpp"
#include "src/device/pin_registry.hpp"
#include "tests/fake_locker.hpp"

// Allocations of this program fail when a test wants it.

namespace {

/// How many allocations of this thread succeed before one fails; none fails if it is negative.
thread_local int successes_before_failure = -1;

void* allocate(std::size_t size) {
    const bool fails = successes_before_failure == 0;
    if (successes_before_failure >= 0) --successes_before_failure;
    if (fails) throw std::bad_alloc();
    if (void* const data = std::malloc(size)) return data;
    throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t size) {
    return allocate(size);
}
void operator delete(void* data) noexcept {
    std::free(data);
}
void operator delete(void* data, std::size_t) noexcept {
    std::free(data);
}

using namespace pinflow;
using namespace pinflow::detail;

TEST_CASE("pin: whichever allocation of a request fails, nothing stays counted, busy or locked") {
    const memory_region memory = memory_region::anonymous(16 * page);
    const auto pages = [&](std::size_t first, std::size_t count) {
        return std::span<const std::byte>(memory.bytes()).subspan(first * page, count * page);
    };
    bool has_succeeded = false;
    int failed_count = 0;
    for (int successes = 0; !has_succeeded; ++successes) {
        CAPTURE(successes);
        fake_locker locker;
        pin_registry registry;
        pin_registry::holds first, second;
        REQUIRE(!registry.acquire(locker, pages(2, 2), true, nullptr, first));
        REQUIRE(!registry.acquire(locker, pages(6, 2), true, nullptr, first));
        successes_before_failure = successes;
        std::optional<pin_refusal> refusal;
        bool has_thrown = false;
        try {
            refusal = registry.acquire(locker, pages(0, 16), true, nullptr, second);
        } catch (const std::bad_alloc&) {
            has_thrown = true;
        }
        successes_before_failure = -1;
        has_succeeded = !refusal && !has_thrown;
        if (!has_succeeded) {
            ++failed_count;
            CHECK(second.empty());
            CHECK(registry.size() == 2);
        }
        registry.release(second);
        registry.release(first);
        CHECK(registry.size() == 0);
        CHECK(locker.locked.empty());
    }
    CHECK(failed_count >= 5);
}
