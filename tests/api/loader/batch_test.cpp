#include "pinflow/loader/batch.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "devices.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"

using namespace pinflow;

TEST_CASE("batch: a slot is not overwritten before the stream of its batch has read it" * blocks_copies) {
    on_each_device([](const device& device) {
        for (const route route : {route::automatic, route::staged}) {
            loader loader(
                {numbered_rows(400, 512)},
                {.device = device, .batch_rows = 10, .order = order::shuffled, .route = route, .slots = 3});
            const stream slow(device);
            const stream other(device);
            gate gate;
            hold(slow, gate);
            // pinned, because a copy to pageable memory would block this thread until `slow` reaches it
            std::vector<pinned_buffer> copies;
            copies.emplace_back(10 * 512 * sizeof(std::uint64_t), device);
            copies.emplace_back(10 * 512 * sizeof(std::uint64_t), device);
            std::vector<std::vector<std::uint64_t>> ids;
            for (const pinned_buffer& copy : copies) {
                const auto batch = loader.next(slow);
                REQUIRE(batch);
                ids.emplace_back(batch->row_ids().begin(), batch->row_ids().end());
                // the consumer is late: this reads long after the lease has ended
                copy_to_host_async(copy.bytes(), (*batch)[0].data(), slow);
            }
            for (int i = 0; i < 30; ++i) {  // the third slot goes round and round meanwhile
                const auto batch = loader.next(other);
                REQUIRE(batch);
                CHECK(holds_its_rows(*batch, other));
            }
            gate.open();
            slow.synchronize();
            for (std::size_t i = 0; i < copies.size(); ++i) {
                const auto* const words = reinterpret_cast<const std::uint64_t*>(copies[i].data());
                for (std::size_t row = 0; row < 10; ++row) {
                    CHECK(words[row * 512] == ids[i][row]);
                    CHECK(words[row * 512 + 511] == ids[i][row]);
                }
            }
        }
    });
}

TEST_CASE("batch: a slot also waits for streams named with used_on" * blocks_copies) {
    on_each_device([](const device& device) {
        loader loader({numbered_rows(40, 256)}, {.device = device, .batch_rows = 10, .slots = 2});
        const stream main(device);
        const stream side(device);
        gate gate;
        const pinned_buffer copy(10 * 256 * sizeof(std::uint64_t), device);
        const auto* const words = reinterpret_cast<const std::uint64_t*>(copy.data());
        {
            auto batch = loader.next(main);
            REQUIRE(batch);
            batch->used_on(side);
            hold(side, gate);
            copy_to_host_async(copy.bytes(), (*batch)[0].data(), side);
            main.synchronize();
        }
        for (int i = 0; i < 2; ++i) {
            const auto next = loader.next(main);
            REQUIRE(next);
            main.synchronize();
        }
        gate.open();
        side.synchronize();
        CHECK(words[0] == 0);
        CHECK(words[10 * 256 - 1] == 9);
    });
}

TEST_CASE("batch: next throws if every slot is leased, and works after a release") {
    on_each_device([](const device& device) {
        loader loader({numbered_rows(100)}, {.device = device, .batch_rows = 10, .slots = 3});
        const stream stream(device);
        std::vector<batch> leased;
        for (int i = 0; i < 3; ++i) {
            leased.push_back(*loader.next(stream));
        }
        CHECK_THROWS_AS(loader.next(stream), all_slots_leased);
        CHECK_THROWS_AS(loader.next(), all_slots_leased);
        for (const batch& batch : leased) {
            CHECK(holds_its_rows(batch, stream));
        }
        leased.erase(leased.begin());
        const auto next = loader.next(stream);
        REQUIRE(next);
        CHECK(next->index() == 3);
    });
}

TEST_CASE("batch: a consumer that leases every slot gets the end, too") {
    on_each_device([](const device& device) {
        loader loader({numbered_rows(30)}, {.device = device, .batch_rows = 10, .slots = 3});
        const stream stream(device);
        std::vector<batch> leased;
        for (int i = 0; i < 3; ++i) {
            auto batch = i == 1 ? loader.next() : loader.next(stream);
            REQUIRE(batch);
            leased.push_back(std::move(*batch));
        }
        CHECK_FALSE(loader.next().has_value());
        CHECK_FALSE(loader.next(stream).has_value());
        for (const batch& batch : leased) {
            CHECK(holds_its_rows(batch, stream));
        }
    });
}

TEST_CASE("batch: a batch outlives its loader, and may move to another thread") {
    on_each_device([](const device& device) {
        std::optional<batch> kept;
        const stream stream(device);
        {
            loader loader({numbered_rows(100)}, {.device = device, .batch_rows = 10});
            kept = loader.next(stream);
        }
        REQUIRE(kept);
        std::thread([batch = std::move(kept), &stream] { CHECK(holds_its_rows(*batch, stream)); }).join();
    });
}

TEST_CASE("batch: without a stream the data is there when next returns") {
    // small rows, which the CPU gathers for a GPU, and ones that the GPU takes from registered pages
    for (const std::uint64_t width : {4U, 8192U}) {
        CAPTURE(width);
        const array content = numbered_rows(100, width);
        on_each_device([&](const device& device) {
            loader loader({content}, {.device = device,
                                      .batch_rows = 32,
                                      .order = order::shuffled,
                                      .epochs = 3,
                                      .pin_budget_bytes = generous_pin_budget});
            const stream unknown(device);  // the loader does not know it, so nothing makes it wait
            std::size_t rows = 0;
            while (const auto batch = loader.next()) {
                CHECK(holds_its_rows(*batch, unknown));
                if (device.kind() == device_kind::host) {
                    CHECK((*batch)[0].as<std::uint64_t>()[width - 1] == batch->row_ids()[0]);
                }
                rows += batch->row_count();
            }
            CHECK(rows == 300);
        });
    }
}

TEST_CASE("batch: the CPU reads elements on the host device, and is refused them on a GPU") {
    on_each_device([](const device& device) {
        loader loader({numbered_rows(7, 3)}, {.device = device, .batch_rows = 5});
        const auto batch = loader.next();
        REQUIRE(batch);
        if (device.kind() == device_kind::host) {
            const std::span<const std::uint64_t> elements = batch->on_host<std::uint64_t>(0);
            REQUIRE(elements.size() == 15);
            for (std::size_t i = 0; i < elements.size(); ++i)
                CHECK(elements[i] == i / 3);
            CHECK_THROWS_AS(batch->on_host<float>(0), invalid_argument);
        } else {
            CHECK_THROWS_AS(batch->on_host<std::uint64_t>(0), invalid_argument);
        }
        CHECK_THROWS_AS(batch->on_host<std::uint64_t>(1), invalid_argument);
    });
}

TEST_CASE("batch: on a GPU the data of a large batch is there when next returns, even with a stream") {
    if (device::cuda_count() == 0) {
        MESSAGE("skipped: there is no CUDA device");
        return;
    }
    const device gpu = device::cuda(0);
    const array content = numbered_rows(400, 8192);
    for (const route route : {route::automatic, route::staged}) {
        loader loader({content}, {.device = gpu,
                                  .batch_rows = 200,
                                  .order = order::shuffled,
                                  .epochs = 3,
                                  .route = route,
                                  .pin_budget_bytes = generous_pin_budget});
        const stream named(gpu);
        const stream unknown(gpu);
        std::size_t rows = 0;
        while (const auto batch = loader.next(named)) {
            CHECK(holds_its_rows(*batch, unknown));
            rows += batch->row_count();
        }
        CHECK(rows == 1200);
    }
}

TEST_CASE("batch: a stream of another device is refused, and no batch is lost by it") {
    if (device::cuda_count() == 0) {
        MESSAGE("skipped: there is no CUDA device");
        return;
    }
    loader loader({numbered_rows(10)}, {.device = device::host(), .batch_rows = 10});
    CHECK_THROWS_AS(loader.next(stream(device::cuda(0))), invalid_argument);
    CHECK(loader.next().has_value());
}
