#include "src/device/slab_pool.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

using namespace pinflow;
using detail::slab_pool;

TEST_CASE("slab_pool: pieces come from slabs, and a returned one is taken again") {
    std::vector<std::byte> slab(100);
    slab_pool pool;
    CHECK(pool.take(1) == nullptr);
    pool.add(slab.data(), slab.size());
    CHECK(pool.take(101) == nullptr);
    CHECK(pool.take(40) == slab.data());
    CHECK(pool.take(60) == slab.data() + 40);
    CHECK(pool.take(1) == nullptr);
    CHECK(pool.give_back(slab.data()).was_taken);
    CHECK(pool.take(50) == nullptr);
    CHECK(pool.take(10) == slab.data());
    CHECK(pool.take(30) == slab.data() + 10);
    CHECK_FALSE(pool.give_back(slab.data() + 1).was_taken);
    CHECK_FALSE(pool.give_back(slab.data() + 200).was_taken);
}

TEST_CASE("slab_pool: an empty slab leaves the pool if another one is empty") {
    std::vector<std::byte> memory(200);
    std::byte* const first = memory.data();
    std::byte* const second = memory.data() + 100;
    slab_pool pool;
    pool.add(second, 100);
    CHECK(pool.take(100) == second);
    pool.add(first, 100);
    CHECK(pool.take(100) == first);
    CHECK(pool.give_back(second).slab == nullptr);
    CHECK(pool.give_back(first).slab == first);
    CHECK(pool.take(100) == second);
    CHECK(pool.take(1) == nullptr);
}

TEST_CASE("slab_pool: pieces of any sizes never overlap, and join when they are returned") {
    constexpr std::uint64_t slab_bytes = 1000;
    constexpr std::uint64_t slab_count = 3;
    std::vector<std::byte> memory(slab_count * slab_bytes);
    slab_pool pool;
    std::set<std::byte*> slabs;
    std::map<std::byte*, std::uint64_t> taken;
    std::mt19937_64 random(90);
    const auto give_back = [&](std::map<std::byte*, std::uint64_t>::iterator piece) {
        const slab_pool::returned returned = pool.give_back(piece->first);
        CHECK(returned.was_taken);
        if (returned.slab != nullptr) CHECK(slabs.erase(returned.slab) == 1);
        taken.erase(piece);
    };
    for (int step = 0; step < 20'000; ++step) {
        if (random() % 2 == 0 && !taken.empty()) {
            give_back(std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size())));
            continue;
        }
        const std::uint64_t size_bytes = 1 + random() % (step % 1000 == 0 ? slab_bytes : 90);
        std::byte* const piece = pool.take(size_bytes);
        if (piece == nullptr) {
            for (std::uint64_t i = 0; i < slab_count; ++i) {
                std::byte* const slab = memory.data() + i * slab_bytes;
                if (!slabs.insert(slab).second) continue;
                pool.add(slab, slab_bytes);
                break;
            }
            continue;
        }
        const auto [at, is_new] = taken.emplace(piece, size_bytes);
        REQUIRE(is_new);
        if (at != taken.begin()) REQUIRE(std::prev(at)->first + std::prev(at)->second <= piece);
        if (std::next(at) != taken.end()) REQUIRE(piece + size_bytes <= std::next(at)->first);
    }
    while (!taken.empty())
        give_back(taken.begin());
    CHECK(slabs.size() == 1);
    CHECK(pool.take(slab_bytes) == *slabs.begin());  // in one piece again
}
