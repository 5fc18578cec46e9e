#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "counting_resource.hpp"
#include "file_bytes.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"
#include "samples.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

TEST_CASE("loader: refuses invalid and contradictory options, and gives the reason") {
    on_each_device([](const device& device) {
        const auto refuses = [&](std::vector<std::shared_ptr<const row_source>> sources,
                                 loader_options options, const std::string& why) {
            options.device = device;
            try {
                const loader loader(std::move(sources), options);
            } catch (const error& error) {
                return std::string(error.what()).find(why) != std::string::npos;
            }
            return false;
        };
        CHECK(refuses({}, {}, "at least one source"));
        CHECK(refuses({numbered_rows(3), numbered_rows(4)}, {}, "the same number of rows"));
        CHECK(refuses({numbered_rows(3)}, {.batch_rows = 0}, "at least one row"));
        CHECK(refuses({numbered_rows(3)}, {.slots = 1}, "at least 2 slots"));
        CHECK(refuses({numbered_rows(100, 1000)}, {.memory_bytes = 1000}, "do not fit into 1000 bytes"));
        CHECK(refuses({numbered_rows(3)}, {.batch_rows = 1, .epochs = ~std::uint64_t{0}}, "too many"));
        CHECK(refuses({numbered_rows(3)}, {.route = route::read}, "no file to read from"));
        CHECK(refuses({numbered_rows(3)}, {.order = static_cast<order>(77)}, "order has no value 77"));
        CHECK(refuses({numbered_rows(3)}, {.route = static_cast<route>(-1)}, "route has no value -1"));
        CHECK(refuses({numbered_rows(3)}, {.tail = static_cast<tail>(2)}, "tail has no value 2"));
        if (device.kind() == device_kind::host) {
            CHECK(refuses({numbered_rows(3)}, {.order = order::shuffled, .route = route::direct},
                          "sequential order"));
            CHECK(refuses({std::make_shared<scripted_rows>(3)}, {.route = route::direct}, "not mapped"));
        } else {
            CHECK(refuses({std::make_shared<scripted_rows>(3)}, {.route = route::direct}, "not mapped"));
            CHECK(refuses({std::make_shared<scripted_rows>(3)}, {.route = route::copy}, "not mapped"));
        }
    });
}

TEST_CASE("loader: memory_bytes limits the number of slots, and the option slots sets it") {
    const array rows = numbered_rows(1000, 128);  // 1 KiB a row
    on_each_device([&](const device& device) {
        const loader few({rows}, {.device = device,
                                  .batch_rows = 100,
                                  .route = route::copy,
                                  .memory_bytes = 350 * 1024,
                                  .pin_budget_bytes = generous_pin_budget});
        CHECK(few.report().slots == 3);
        CHECK(few.report().slot_bytes == 100 * 1024);
        const loader both_sides(
            {rows},
            {.device = device, .batch_rows = 100, .route = route::staged, .memory_bytes = 450 * 1024});
        CHECK(both_sides.report().slots == 2);
        const loader asked({rows}, {.device = device, .batch_rows = 100, .slots = 20});
        CHECK(asked.report().slots == 20);
        // on a GPU, slots of the automatic route also have a host side: rows are staged until their pages are
        // registered
        const unsigned sides = device.kind() == device_kind::host ? 1U : 2U;
        const std::uint64_t memory_bytes = 1100 * 1024;
        const loader chosen({rows}, {.device = device, .batch_rows = 100, .memory_bytes = memory_bytes});
        CHECK(chosen.report().slots == (sides == 1 ? 10U : 5U));
        CHECK(chosen.report().slots * chosen.report().slot_bytes * sides <= memory_bytes);
    });
}

TEST_CASE("loader: the lists of row numbers count as its memory too, and a null source is refused") {
    on_each_device([](const device& device) {
        CHECK_THROWS_AS(loader({array_of(std::vector<std::uint8_t>(100'000), {100'000})},
                               {.device = device, .batch_rows = 50'000, .memory_bytes = 150'000}),
                        invalid_argument);
        CHECK_THROWS_AS(loader({nullptr}, {.device = device}), invalid_argument);
    });
}

TEST_CASE("loader: device memory comes from the caller's resource, and goes back to it with the last batch") {
    on_each_device([](const device& device) {
        const temporary_folder folder;
        std::mt19937_64 random(81);
        const known_sample sample{npy_file(folder / "rows.npy", "|u1", {400, 96}, random),
                                  npy_file(folder / "labels.npy", "<i8", {400}, random)};
        const auto resource = std::make_shared<counting_resource>();
        std::optional<batch> kept;
        {
            loader loader(
                sources_of(sample),
                {.device = device, .batch_rows = 32, .order = order::shuffled, .device_memory = resource});
            CHECK(resource->allocated > 0);
            kept = loader.next();
            std::uint64_t rows = kept->row_count();
            while (const auto next = loader.next())
                rows += next->row_count();
            CHECK(rows == 400);
        }
        CHECK(resource->deallocated < resource->allocated);
        kept.reset();
        CHECK(resource->deallocated == resource->allocated);
    });
}

TEST_CASE("loader: the end of the last batch does not wait for its stream, also with a caller's resource" *
          blocks_a_stream) {
    on_each_device([](const device& device) {
        const temporary_folder folder;
        std::mt19937_64 random(82);
        const known_sample sample{npy_file(folder / "rows.npy", "|u1", {64, 96}, random)};
        const auto resource = std::make_shared<counting_resource>();
        const stream stream(device);
        const gate gate;
        {
            loader loader(sources_of(sample),
                          {.device = device, .batch_rows = 32, .device_memory = resource});
            const auto last = loader.next(stream);
            REQUIRE(last);
            hold(stream, gate);
        }
        gate.open();
        stream.synchronize();
    });
}
