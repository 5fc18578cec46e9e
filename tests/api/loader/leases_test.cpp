#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"
#include "samples.hpp"
#include "temporary_folder.hpp"

// Consumers that hold batches, release them in any order, use several streams, or are several threads.
using namespace pinflow;

namespace {

constexpr std::uint64_t row_count = 403;
constexpr std::uint64_t batch_rows = 20;
constexpr std::uint64_t batch_count = (row_count + batch_rows - 1) / batch_rows;

/// Rows of 3 KiB, with labels of 8 bytes.
known_sample images_and_labels(const temporary_folder& folder) {
    std::mt19937_64 random(10);
    return {npy_file(folder / "images.npy", "|u1", {row_count, 3, 32, 32}, random),
            npy_file(folder / "labels.npy", "<i8", {row_count}, random)};
}

loader_options options_with_slots(const device& device, order order, route route, unsigned slots) {
    loader_options options = options_for(device, order);
    options.batch_rows = batch_rows;
    options.route = route;
    options.slots = slots;
    return options;
}

/// Calls `body(sample, device, order, route)` for the sequential and the shuffled order, and for every route
/// of each device.
template <typename Body>
void for_every_route(Body body) {
    const temporary_folder folder;
    const known_sample sample = images_and_labels(folder);
    on_each_device([&](const device& device) {
        for (const order order : {order::sequential, order::shuffled}) {
            for (const route route : routes_of(sample, device, order)) {
                INFO("route " << to_string(route) << ", order " << to_string(order));
                body(sample, device, order, route);
            }
        }
    });
}

}  // namespace

TEST_CASE("leases: any number of leased batches stays intact") {
    for_every_route([](const known_sample& sample, const device& device, order order, route route) {
        constexpr unsigned slots = 5;
        for (const std::size_t leased_count : {1U, 3U, slots - 1, slots}) {
            CAPTURE(leased_count);
            loader loader(sources_of(sample), options_with_slots(device, order, route, slots));
            const stream stream(device);
            std::deque<batch> leased;
            std::uint64_t batches = 0;
            for (;;) {
                if (leased.size() == leased_count) {
                    CHECK(holds_rows_of(sample, leased.front(), stream));
                    if (leased_count == slots && batches < batch_count)
                        CHECK_THROWS_AS(loader.next(stream), all_slots_leased);
                    leased.pop_front();
                }
                auto batch = loader.next(stream);
                if (!batch) break;
                CHECK(batch->index() == batches);
                leased.push_back(std::move(*batch));
                ++batches;
            }
            for (const batch& batch : leased)
                CHECK(holds_rows_of(sample, batch, stream));
            CHECK(batches == batch_count);
        }
    });
}

TEST_CASE("leases: batches may be released in any order") {
    for_every_route([](const known_sample& sample, const device& device, order order, route route) {
        std::mt19937_64 random(11);
        constexpr unsigned slots = 6;
        loader_options options = options_with_slots(device, order, route, slots);
        options.epochs = 3;
        loader loader(sources_of(sample), options);
        const stream stream(device);
        std::vector<batch> leased;
        std::uint64_t batches = 0;
        for (;;) {
            while (!leased.empty() && (leased.size() == slots || random() % 3 == 0)) {
                const auto chosen = leased.begin() + static_cast<std::ptrdiff_t>(random() % leased.size());
                CHECK(holds_rows_of(sample, *chosen, stream));
                if (random() % 2 == 0) chosen->release();
                leased.erase(chosen);
            }
            auto batch = loader.next(stream);
            if (!batch) break;
            CHECK(batch->epoch() == batches / batch_count);
            CHECK(batch->index() == batches % batch_count);
            leased.push_back(std::move(*batch));
            ++batches;
        }
        CHECK(batches == 3 * batch_count);
    });
}

TEST_CASE("leases: a released batch is empty, and releasing it again does nothing") {
    for_every_route([](const known_sample& sample, const device& device, order order, route route) {
        loader loader(sources_of(sample), options_with_slots(device, order, route, 2));
        auto batch = loader.next();
        REQUIRE(batch);
        batch->release();
        batch->release();
        CHECK(batch->row_count() == 0);
        CHECK(batch->array_count() == 0);
        CHECK(batch->row_ids().empty());
        CHECK_THROWS_AS((*batch)[0], invalid_argument);
        CHECK_THROWS_AS(static_cast<void>(batch->state()), invalid_argument);
        const stream stream(device);
        digest sum(device);
        CHECK_THROWS_AS(sum.add_async(*batch, stream), invalid_argument);
        for (std::uint64_t index = 1; index < batch_count; ++index) {
            const auto next = loader.next(stream);
            REQUIRE(next);
            CHECK(holds_rows_of(sample, *next, stream));
        }
    });
}

TEST_CASE("leases: a slot waits for every stream that a batch was used on" * blocks_copies) {
    for_every_route([](const known_sample& sample, const device& device, order order, route route) {
        loader loader(sources_of(sample), options_with_slots(device, order, route, 3));
        const stream main(device);
        const stream first(device);
        const stream second(device);
        gate first_gate;
        gate second_gate;
        const std::size_t image_bytes = sample[0].source->row_size_bytes();
        const pinned_buffer first_copy(batch_rows * image_bytes, device);
        const pinned_buffer second_copy(batch_rows * image_bytes, device);
        std::vector<std::uint64_t> ids;
        {
            auto batch = loader.next(main);
            REQUIRE(batch);
            ids.assign(batch->row_ids().begin(), batch->row_ids().end());
            batch->used_on(first);
            batch->used_on(second);
            batch->used_on(first);  // naming it once more changes nothing
            hold(first, first_gate);
            hold(second, second_gate);
            copy_to_host_async(first_copy.bytes(), (*batch)[0].data(), first);
            copy_to_host_async(second_copy.bytes(), (*batch)[0].data(), second);
        }
        // the other slots go round and round meanwhile
        const auto take_some = [&](int count) {
            for (int i = 0; i < count; ++i) {
                const auto batch = loader.next(main);
                REQUIRE(batch);
                CHECK(holds_rows_of(sample, *batch, main));
            }
        };
        take_some(6);
        first_gate.open();
        first.synchronize();
        take_some(6);
        second_gate.open();
        second.synchronize();
        for (std::size_t i = 0; i < batch_rows; ++i) {
            const auto image = sample[0].row(ids[i]);
            CHECK(same_bytes(first_copy.bytes().subspan(i * image_bytes, image_bytes), image));
            CHECK(same_bytes(second_copy.bytes().subspan(i * image_bytes, image_bytes), image));
        }
        take_some(static_cast<int>(batch_count) - 13);
        CHECK_FALSE(loader.next(main).has_value());
    });
}

TEST_CASE("leases: consumers with a stream and without one take turns") {
    for_every_route([](const known_sample& sample, const device& device, order order, route route) {
        loader loader(sources_of(sample), options_with_slots(device, order, route, 4));
        const stream first(device);
        const stream second(device);
        const stream unknown(device);  // the loader does not know it, so nothing makes it wait
        for (std::uint64_t index = 0; index < batch_count; ++index) {
            const auto batch = index % 3 == 0   ? loader.next()
                               : index % 3 == 1 ? loader.next(first)
                                                : loader.next(second);
            REQUIRE(batch);
            CHECK(batch->index() == index);
            const stream_view reading = index % 3 == 0 ? unknown : index % 3 == 1 ? first : second;
            CHECK(holds_rows_of(sample, *batch, reading));
        }
        CHECK_FALSE(loader.next().has_value());
        CHECK_FALSE(loader.next(first).has_value());
    });
}

TEST_CASE("leases: a null handle is refused on the host device, and no batch is lost") {
    const temporary_folder folder;
    const known_sample sample = images_and_labels(folder);
    const device device = device::host();
    const stream_view null(device, nullptr);
    loader loader(sources_of(sample), options_with_slots(device, order::sequential, route::automatic, 2));
    for (std::uint64_t index = 0; index < batch_count; ++index) {
        CHECK_THROWS_AS(loader.next(null), invalid_argument);
        std::optional<batch> batch = loader.next();
        REQUIRE(batch);
        CHECK(batch->index() == index);
        CHECK_THROWS_AS(batch->used_on(null), invalid_argument);
    }
    CHECK_FALSE(loader.next());
}

TEST_CASE("leases: several threads lease and release batches in any order, and share all of them") {
    for_every_route([](const known_sample& sample, const device& device, order order, route route) {
        constexpr std::uint64_t epochs = 3;
        constexpr unsigned thread_count = 4;
        // a thread that calls `next` holds 2 batches at most, one less than its share of the slots, so that
        // no thread finds all slots leased
        constexpr unsigned leased_by_each = 2;
        loader_options options =
            options_with_slots(device, order, route, thread_count * (leased_by_each + 1));
        options.epochs = epochs;
        loader loader(sources_of(sample), options);
        std::mutex mutex;
        std::vector<std::uint64_t> seen;
        bool right = true;
        std::vector<std::thread> threads;
        for (unsigned number = 0; number < thread_count; ++number) {
            threads.emplace_back([&, number] {
                std::mt19937_64 random(number);
                const stream stream(device);
                std::vector<batch> leased;
                for (;;) {
                    auto batch = random() % 4 == 0 ? loader.next() : loader.next(stream);
                    if (!batch) break;
                    {
                        const std::lock_guard lock(mutex);
                        seen.push_back(batch->epoch() * batch_count + batch->index());
                    }
                    leased.push_back(std::move(*batch));
                    if (leased.size() <= leased_by_each) continue;
                    const auto chosen =
                        leased.begin() + static_cast<std::ptrdiff_t>(random() % leased.size());
                    const bool holds = holds_rows_of(sample, *chosen, stream);
                    leased.erase(chosen);
                    const std::lock_guard lock(mutex);
                    right = right && holds;
                }
                for (const batch& batch : leased) {
                    const bool holds = holds_rows_of(sample, batch, stream);
                    const std::lock_guard lock(mutex);
                    right = right && holds;
                }
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        CHECK(right);
        std::ranges::sort(seen);
        REQUIRE(seen.size() == epochs * batch_count);
        for (std::size_t i = 0; i < seen.size(); ++i)
            CHECK(seen[i] == i);
    });
}
