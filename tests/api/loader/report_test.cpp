#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "arrays.hpp"
#include "pinflow/loader/loader.hpp"
#include "samples.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

TEST_CASE("loader: reports that it waited for a slow consumer" * blocks_copies) {
    // what it reports if the consumer's stream is busy for so long
    const auto report_after = [](const device& device, std::chrono::milliseconds length) {
        const auto source = std::make_shared<scripted_rows>(100);
        loader loader({source}, {.device = device, .batch_rows = 10, .slots = 2});
        const stream stream(device);
        gate gate;
        hold(stream, gate);
        for (int i = 0; i < 2; ++i) {
            loader.next(stream);
        }
        std::thread opener([&] {
            const auto until = std::chrono::steady_clock::now() + length;
            while (std::chrono::steady_clock::now() < until) {
                std::this_thread::yield();
            }
            gate.open();
        });
        while (loader.next(stream)) {
        }
        opener.join();
        return loader.report();
    };
    on_each_device([&](const device& device) {
        bool is_the_consumers = false;
        for (const int milliseconds : {50, 200, 800}) {  // longer, if other work holds the threads up
            const std::chrono::milliseconds length(milliseconds);
            const loader_report report = report_after(device, length);
            is_the_consumers = report.consumer_wait > length / 2 &&
                               report.consumer_wait > report.storage_wait + report.cpu_wait;
            if (is_the_consumers) break;
        }
        CHECK(is_the_consumers);
    });
}

TEST_CASE("report: the counts of delivered batches add up, and the route is the requested route") {
    std::mt19937_64 random(60);
    constexpr std::uint64_t row_count = 205;
    const temporary_folder folder;
    const known_sample sample{npy_file(folder / "images.npy", "|u1", {row_count, 3, 32, 32}, random),
                              npy_file(folder / "labels.npy", "<i8", {row_count}, random),
                              npy_file(folder / "masks.npy", "|u1", {row_count}, random)};
    constexpr std::uint64_t sample_bytes = 3 * 32 * 32 + 8 + 1;
    on_each_device([&](const device& device) {
        for (const order order : every_plain_order) {
            for (const route route : routes_of(sample, device, order)) {
                INFO("route " << to_string(route) << ", order " << to_string(order));
                loader_options options = options_for(device, order);
                options.batch_rows = 20;
                options.epochs = 2;
                options.route = route;
                options.slots = 5;
                loader loader(sources_of(sample), options);
                const stream stream(device);
                std::uint64_t batches = 0;
                std::uint64_t rows = 0;
                const auto check_counts = [&] {
                    const loader_report report = loader.report();
                    CHECK(report.batches == batches);
                    CHECK(report.rows == rows);
                    CHECK(report.bytes == rows * sample_bytes);
                    CHECK(report.slots == 5);
                    CHECK_FALSE(report.reason.empty());
                    CHECK_FALSE(report.verdict().empty());
                    if (route == route::automatic)
                        CHECK(report.route != route::automatic);
                    else
                        CHECK(report.route == route);
                };
                check_counts();
                CHECK(loader.report().wall_time.count() == 0);
                while (const auto batch = loader.next(stream)) {
                    ++batches;
                    rows += batch->row_count();
                    check_counts();
                }
                check_counts();
                CHECK(batches == loader.batch_total());
                CHECK(rows == loader.row_total());
                CHECK(rows == 2 * row_count);
                const loader_report report = loader.report();
                CHECK(report.wall_time.count() > 0);
                CHECK(report.storage_wait + report.cpu_wait + report.link_wait <= report.wall_time);
                CHECK(report.consumer_wait <= report.wall_time);
                CHECK(report.mean_ready <= report.max_ready);
                CHECK(report.max_ready <= report.slots);
                CHECK(report.rows_per_second() > 0);
                CHECK(report.bytes_per_second() > report.rows_per_second());
            }
        }
    });
}

TEST_CASE("report: stays the same after the loader has ended") {
    on_each_device([](const device& device) {
        loader loader({numbered_rows(95)}, {.device = device, .batch_rows = 10});
        const stream stream(device);
        while (loader.next(stream)) {
        }
        const loader_report report = loader.report();
        CHECK_FALSE(loader.next(stream).has_value());
        const loader_report later = loader.report();
        CHECK(later.wall_time == report.wall_time);
        CHECK(later.batches == 10);
        CHECK(later.rows == 95);
        CHECK(later.verdict() == report.verdict());
    });
}

TEST_CASE("report: counts the batches of all consumer threads") {
    on_each_device([](const device& device) {
        loader loader({numbered_rows(1003)}, {.device = device, .batch_rows = 10, .slots = 8});
        std::atomic<std::uint64_t> rows = 0;
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; ++t) {
            threads.emplace_back([&] {
                const stream stream(device);
                while (const auto batch = loader.next(stream)) {
                    rows += batch->row_count();
                    static_cast<void>(loader.report());
                }
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        const loader_report report = loader.report();
        CHECK(rows == 1003);
        CHECK(report.rows == 1003);
        CHECK(report.batches == 101);
        CHECK(report.bytes == 1003 * 32);
    });
}
