#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

TEST_CASE(
    "loader: files are read by every route that the host has, also big-endian ones and ones with a header of "
    "any size") {
    const temporary_folder folder;
    const array content = numbered_rows(333, 33);
    write_npy(folder / "rows.npy", content.view());
    for (const route route : {route::automatic, route::direct, route::copy, route::staged, route::read}) {
        CAPTURE(to_string(route));
        loader loader({open_npy(folder / "rows.npy")},
                      {.device = device::host(), .batch_rows = 50, .route = route});
        const stream stream(device::host());
        std::uint64_t rows = 0;
        while (const auto batch = loader.next(stream)) {
            CHECK(holds_its_rows(*batch, stream));
            rows += batch->row_count();
        }
        CHECK(rows == 333);
        const loader_report report = loader.report();
        CHECK(report.route == (route == route::automatic ? route::copy : route));
        CHECK_FALSE(report.reason.empty());
        CHECK(report.rows == 333);
        CHECK(report.bytes == 333 * 33 * 8);
    }
}

TEST_CASE(
    "loader: the direct route's batches are the mapping itself, and stay readable after everything else has "
    "gone") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100).view());
    const stream stream(device::host());
    std::optional<batch> kept;
    {
        array mapped = open_npy(folder / "rows.npy");
        const std::byte* const data = mapped.view().data();
        loader loader({mapped}, {.device = device::host(), .batch_rows = 60, .route = route::direct});
        kept = loader.next(stream);
        REQUIRE(kept);
        CHECK((*kept)[0].data() == data);
    }
    CHECK(holds_its_rows(*kept, stream));
}

TEST_CASE("loader: a GPU is fed from the mapped pages, from slots, and from both, with the same rows") {
    if (device::cuda_count() == 0) {
        MESSAGE("skipped: there is no CUDA device");
        return;
    }
    const device device = device::cuda(0);
    const temporary_folder folder;
    write_npy(folder / "large.npy", numbered_rows(300, 8192).view());  // rows of 64 KiB
    write_npy(folder / "small.npy", numbered_rows(300, 3).view());
    for (const order order : {order::sequential, order::shuffled}) {
        for (const route route : {route::automatic, route::direct, route::copy, route::staged, route::read}) {
            CAPTURE(to_string(route));
            loader loader({open_npy(folder / "large.npy"), open_npy(folder / "small.npy")},
                          {.device = device,
                           .batch_rows = 32,
                           .order = order,
                           .epochs = 3,
                           .route = route,
                           .pin_budget_bytes = generous_pin_budget});
            const stream stream(device);
            std::uint64_t rows = 0;
            while (const auto batch = loader.next(stream)) {
                CHECK(holds_its_rows(*batch, stream));
                const auto labels = elements_of<std::uint64_t>(*batch, 1, stream);
                for (std::size_t i = 0; i < batch->row_count(); ++i) {
                    CHECK(labels[i * 3 + 2] == batch->row_ids()[i]);
                }
                rows += batch->row_count();
            }
            CHECK(rows == 900);
            CHECK(loader.report().route == (route == route::automatic ? route::copy : route));
            if (loader.report().route == route::copy) {
                CHECK(loader.report().reason.find("registered") != std::string::npos);
                CHECK(loader.report().pin_time.count() > 0);
            }
        }
    }
    // the first epochs are staged until the pages are registered, then groups of batches come together
    loader small({open_npy(folder / "small.npy")}, {.device = device,
                                                    .batch_rows = 7,
                                                    .order = order::shuffled,
                                                    .epochs = 2000,
                                                    .pin_budget_bytes = generous_pin_budget});
    CHECK(small.report().route == route::direct);
    const stream stream(device);
    std::uint64_t rows = 0;
    while (const auto batch = small.next(stream)) {
        CHECK(holds_its_rows(*batch, stream));
        rows += batch->row_count();
        if (rows == 3000 && small.report().pin_time.count() == 0) rows = 0;  // not registered yet
        if (rows > 30000) break;
    }
    CHECK(rows > 30000);
    CHECK(small.report().reason.find("registered") != std::string::npos);
}

TEST_CASE("loader: on the direct route, a stream's task may release the last batch after all else is gone") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100).view());
    const stream stream(device::host());
    gate gate;
    bool right = false;
    {
        loader loader({open_npy(folder / "rows.npy")},
                      {.device = device::host(), .batch_rows = 10, .route = route::direct});
        auto shared = std::make_shared<batch>(*loader.next(stream));
        stream.host_function_async([&gate, &right, shared] {
            gate.wait();
            right = (*shared)[0].as<std::uint64_t>()[39] == 9;
        });
    }
    gate.open();
    stream.synchronize();
    CHECK(right);
}

TEST_CASE(
    "loader: on the direct route, the mapping stays until the streams have passed, and no thread waits") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100).view());
    const stream stream(device::host());
    gate gate;
    std::uint64_t seen = 0;
    {
        loader loader({open_npy(folder / "rows.npy")},
                      {.device = device::host(), .batch_rows = 10, .route = route::direct});
        const auto batch = loader.next(stream);
        REQUIRE(batch);
        hold(stream, gate);
        stream.host_function_async([&seen, rows = (*batch)[0].as<std::uint64_t>()] { seen = rows[39]; });
    }
    gate.open();
    stream.synchronize();
    CHECK(seen == 9);
}

TEST_CASE("loader: its destructor does not wait for a consumer's stream that is stuck" * blocks_copies) {
    const temporary_folder folder;
    constexpr std::uint64_t width = 8192;  // rows of 64 KiB, which a GPU takes from the mapped pages
    write_npy(folder / "rows.npy", numbered_rows(100, width).view());
    on_each_device([&](const device& device) {
        const stream stuck(device);
        gate gate;
        const pinned_buffer copy(10 * width * sizeof(std::uint64_t), device);
        const auto* const words = reinterpret_cast<const std::uint64_t*>(copy.data());
        {
            loader loader(
                {open_npy(folder / "rows.npy")},
                {.device = device, .batch_rows = 10, .slots = 2, .pin_budget_bytes = generous_pin_budget});
            for (int i = 0; i < 2; ++i) {
                const auto batch = loader.next(stuck);
                REQUIRE(batch);
                if (i == 0) hold(stuck, gate);
                copy_to_host_async(copy.bytes(), (*batch)[0].data(), stuck);
            }
        }
        gate.open();
        stuck.synchronize();
        CHECK(words[0] == 10);
        CHECK(words[10 * width - 1] == 19);
    });
}
