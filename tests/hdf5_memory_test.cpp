#include "formats/hdf5_memory.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace {

using pinflow::detail::hdf5_cached_chunk;
using pinflow::detail::hdf5_chunk_bytes;
using pinflow::detail::hdf5_chunk_cache;
using pinflow::detail::hdf5_chunk_key;
using pinflow::detail::hdf5_chunk_memory;
using pinflow::detail::hdf5_chunk_pool;
using pinflow::detail::hdf5_memory;
using answer = hdf5_chunk_cache::answer;

constexpr std::uint64_t chunk_bytes = 1000;
constexpr std::uint64_t cost_bytes = chunk_bytes + 256;

hdf5_chunk_memory chunk_of(std::byte value) {
    hdf5_chunk_memory memory(new std::byte[chunk_bytes], std::default_delete<std::byte[]>());
    memory.get()[0] = value;
    return memory;
}

/// Notes what it is called for.
class noting_user final : public hdf5_chunk_cache::user {
 public:
    void use(std::size_t work, const hdf5_chunk_bytes& chunk) noexcept override {
        used.insert(work);
        last = *chunk.data;
        last_shuffled_bytes = chunk.shuffle_element_bytes;
    }
    void ask_again(std::size_t work) noexcept override { again.insert(work); }

    std::set<std::size_t> used;
    std::set<std::size_t> again;
    std::byte last{};
    std::uint64_t last_shuffled_bytes = 0;
};

/// Requests a chunk, and decodes it if it is not cached. @return whether it was decoded.
bool want(hdf5_chunk_cache& cache, const hdf5_chunk_key& key, bool wanted_again) {
    noting_user user;
    hdf5_cached_chunk found;
    switch (cache.ask(key, user, 0, found)) {
        case answer::found:
            CHECK(found);
            return false;
        case answer::claimed: {
            const auto memory = chunk_of(static_cast<std::byte>(key.index));
            cache.complete(key, {{memory.get(), 0}, memory, chunk_bytes, wanted_again});
            return true;
        }
        case answer::promised:
            break;
    }
    FAIL("nobody else decodes");
    return false;
}

}  // namespace

TEST_CASE("hdf5_memory: a request for a chunk that is being decoded is served when decoding completes") {
    hdf5_chunk_cache cache(0);
    noting_user first;
    noting_user second;
    hdf5_cached_chunk found;
    CHECK(cache.ask({1, 5}, first, 0, found) == answer::claimed);
    CHECK(cache.ask({1, 5}, second, 7, found) == answer::promised);
    CHECK(cache.ask({1, 5}, second, 8, found) == answer::promised);
    CHECK(cache.ask({2, 5}, second, 9, found) == answer::claimed);  // another reader's
    CHECK(!cache.peek({1, 5}));
    const auto memory = chunk_of(std::byte{3});
    cache.complete({1, 5}, {{memory.get(), 4}, memory, chunk_bytes, true});
    CHECK(second.used == std::set<std::size_t>{7, 8});
    CHECK(second.last == std::byte{3});
    CHECK(second.last_shuffled_bytes == 4);
    CHECK(first.used.empty());
    // a cache of 0 bytes keeps nothing
    CHECK(memory.use_count() == 1);
    CHECK(cache.ask({1, 5}, first, 0, found) == answer::claimed);
    CHECK(cache.ask({1, 5}, second, 10, found) == answer::promised);
    cache.give_up({1, 5});
    CHECK(second.again == std::set<std::size_t>{10});
    CHECK(cache.ask({1, 5}, first, 0, found) == answer::claimed);
    cache.give_up({1, 5});
    cache.give_up({2, 5});
}

TEST_CASE("hdf5_memory: chunks requested once do not evict chunks requested again") {
    hdf5_chunk_cache cache(16 * cost_bytes);
    for (std::uint64_t index = 0; index < 10; ++index)
        CHECK(want(cache, {1, index}, true));
    for (std::uint64_t index = 100; index < 200; ++index)
        CHECK(want(cache, {1, index}, false));
    for (std::uint64_t index = 0; index < 10; ++index)
        CHECK(!want(cache, {1, index}, true));
    // chunks that were requested once share an eighth of the cache: the last two of them are kept
    CHECK(!cache.peek({1, 197}));
    CHECK(cache.peek({1, 198}));
    CHECK(cache.peek({1, 199}));
    // and among those that are wanted again, the ones used last stay
    CHECK(!want(cache, {1, 0}, true));
    for (std::uint64_t index = 10; index < 23; ++index)
        CHECK(want(cache, {1, index}, true));
    CHECK(!want(cache, {1, 0}, true));
    CHECK(!cache.peek({1, 1}));
}

TEST_CASE("hdf5_memory: a chunk that is kept shuffled is found as such") {
    hdf5_chunk_cache cache(16 * cost_bytes);
    noting_user user;
    hdf5_cached_chunk found;
    for (const std::uint64_t shuffle_element_bytes : {0u, 8u}) {
        for (const bool wanted_again : {false, true}) {
            const hdf5_chunk_key key{1, 10 * shuffle_element_bytes + (wanted_again ? 1 : 0)};
            CHECK(cache.ask(key, user, 0, found) == answer::claimed);
            const auto memory = chunk_of(std::byte{3});
            cache.complete(key, {{memory.get(), shuffle_element_bytes}, memory, chunk_bytes, wanted_again});
            CHECK(cache.ask(key, user, 0, found) == answer::found);
            CHECK(found.bytes().data == memory.get());
            CHECK(found.bytes().shuffle_element_bytes == shuffle_element_bytes);
            CHECK(cache.peek(key).bytes().shuffle_element_bytes == shuffle_element_bytes);
        }
    }
}

TEST_CASE("hdf5_memory: a cache never exceeds its limit, except for one chunk") {
    std::mt19937_64 random(1);
    for (const std::uint64_t max_bytes :
         {std::uint64_t{1}, cost_bytes - 1, cost_bytes, 3 * cost_bytes, 17 * cost_bytes + 5}) {
        hdf5_chunk_cache cache(max_bytes);
        std::vector<std::weak_ptr<std::byte>> all;
        for (int step = 0; step < 500; ++step) {
            noting_user user;
            hdf5_cached_chunk found;
            const hdf5_chunk_key key{1 + random() % 3, random() % 40};
            if (cache.ask(key, user, 0, found) == answer::claimed) {
                auto memory = chunk_of({});
                all.push_back(memory);
                const std::byte* const data = memory.get();
                cache.complete(key, {{data, 0}, std::move(memory), chunk_bytes, random() % 2 == 0});
            }
            found = {};
            std::uint64_t kept = 0;
            for (const auto& memory : all)
                kept += memory.expired() ? 0U : 1U;
            CHECK(kept >= 1);
            CHECK((kept == 1 || kept * cost_bytes <= max_bytes));
        }
        for (std::uint64_t reader = 1; reader <= 3; ++reader)
            cache.forget(reader);
        for (const auto& memory : all)
            CHECK(memory.expired());
    }
}

TEST_CASE("hdf5_memory: a reader's chunks are dropped with it, and those of other readers stay") {
    hdf5_chunk_cache cache(100 * cost_bytes);
    for (std::uint64_t index = 0; index < 5; ++index) {
        want(cache, {1, index}, index % 2 == 0);
        want(cache, {2, index}, index % 2 == 0);
    }
    cache.forget(1);
    for (std::uint64_t index = 0; index < 5; ++index) {
        CHECK(!cache.peek({1, index}));
        CHECK(cache.peek({2, index}));
    }
}

TEST_CASE("hdf5_memory: returned chunks are reused up to a limit, and may outlive the pool") {
    constexpr std::uint64_t size = 1 << 20;
    hdf5_chunk_memory left;
    {
        const hdf5_chunk_pool pool(2 * size);
        std::vector<hdf5_chunk_memory> taken;
        std::set<std::byte*> known;
        for (int count = 0; count < 4; ++count) {
            taken.push_back(pool.take(size));
            known.insert(taken.back().get());
            taken.back().get()[size - 1] = std::byte{1};
        }
        CHECK(known.size() == 4);
        taken.clear();
        // two were kept; fresh memory is all zeros
        int used = 0;
        for (int count = 0; count < 4; ++count) {
            taken.push_back(pool.take(size));
            used += taken.back().get()[size - 1] == std::byte{1} ? 1 : 0;
        }
        CHECK(used == 2);
        // of another size there are none
        taken.clear();
        CHECK(pool.take(size + 4096).get()[size - 1] == std::byte{});
        CHECK(pool.take(100) != nullptr);
        left = pool.take(size);
    }
    left.get()[0] = std::byte{2};
    left.reset();
}

TEST_CASE("hdf5_memory: as many threads decode as memory allows, at least one") {
    hdf5_memory memory(0, 100);
    CHECK(memory.size_bytes() == 100);
    CHECK(memory.try_begin_decoding(60));
    CHECK(!memory.try_begin_decoding(60));
    CHECK(memory.try_begin_decoding(40));
    memory.end_decoding(60);
    memory.end_decoding(40);
    // more than there is, when nobody else decodes
    CHECK(memory.try_begin_decoding(1000));
    CHECK(!memory.try_begin_decoding(0));
    std::atomic<bool> has_begun = false;
    std::thread waiting([&] {
        memory.begin_decoding(70);
        has_begun = true;
    });
    memory.end_decoding(1000);
    waiting.join();
    CHECK(has_begun);
    CHECK(!memory.try_begin_decoding(31));
    CHECK(memory.try_begin_decoding(30));
    memory.end_decoding(30);
    memory.end_decoding(70);
}

TEST_CASE("hdf5_memory: many decoding threads together never exceed the limit") {
    constexpr std::uint64_t most = 1000;
    hdf5_memory memory(0, most);
    std::atomic<std::uint64_t> taken = 0;
    std::atomic<unsigned> too_many = 0;
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 8; ++number) {
        threads.emplace_back([&, number] {
            std::mt19937_64 random(number);
            for (int round = 0; round < 500; ++round) {
                const std::uint64_t size = 1 + random() % 1500;
                if (random() % 2 == 0) {
                    memory.begin_decoding(size);
                } else if (!memory.try_begin_decoding(size)) {
                    continue;
                }
                const std::uint64_t now = taken += size;
                if (now > most && now != size) ++too_many;
                std::this_thread::yield();
                taken -= size;
                memory.end_decoding(size);
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(too_many == 0);
    CHECK(memory.try_begin_decoding(most));
    memory.end_decoding(most);
}
