#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "arrays.hpp"
#include "file_bytes.hpp"
#include "limits.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/loader/report.hpp"

// What a report says is the limit.
using namespace pinflow;
using namespace limits;

namespace {

loader_report report_with(int storage, int cpu, int link, int consumer, int wall) {
    loader_report report;
    report.storage_wait = seconds(storage);
    report.cpu_wait = seconds(cpu);
    report.link_wait = seconds(link);
    report.consumer_wait = seconds(consumer);
    report.wall_time = seconds(wall);
    return report;
}

}  // namespace

TEST_CASE("report: the verdict names the longest wait in words") {
    CHECK(contains_all(report_with(0, 0, 0, 92, 100).verdict(),
                       {"consumer is the limit", "the loader waited 92%"}));
    CHECK(contains_all(report_with(68, 3, 0, 5, 100).verdict(),
                       {"storage is the limit", "the consumer waited 71%", "96% of that", "reads"}));
    CHECK(
        contains_all(report_with(1, 59, 0, 5, 100).verdict(),
                     {"CPU is the limit", "the consumer waited 60%", "98% of that", "rows to be gathered"}));
    CHECK(contains_all(
        report_with(0, 10, 30, 5, 100).verdict(),
        {"link is the limit", "the consumer waited 40%", "75% of that", "copies to the device"}));
    CHECK(contains_all(report_with(4, 3, 2, 11, 100).verdict(),
                       {"nothing stands out", "the consumer waited 9%", "the loader 11%"}));
    CHECK(contains(report_with(0, 0, 0, 0, 0).verdict(), "no batch has been requested"));
    // both wait by turns: the larger share counts
    CHECK(report_with(30, 0, 0, 40, 100).verdict().starts_with("the consumer is the limit"));
    CHECK(report_with(40, 0, 0, 30, 100).verdict().starts_with("the storage is the limit"));
    // three threads that wait at the same time
    CHECK(contains_all(report_with(250, 0, 0, 0, 100).verdict(),
                       {"storage is the limit", "the consumer waited 100%", "100% of that", "reads"}));
}

TEST_CASE("report: rates are by wall time, and 0 without any wall time") {
    loader_report report = report_with(0, 0, 0, 0, 4);
    report.bytes = 1000;
    report.rows = 10;
    CHECK(report.bytes_per_second() == 250.0);
    CHECK(report.rows_per_second() == 2.5);
    report.wall_time = {};
    CHECK(report.bytes_per_second() == 0.0);
}

TEST_CASE("report: time in a source that blocks counts as storage, although it reports no wait") {
    const auto rows = std::make_shared<scripted_rows>(batch_rows * batch_count);
    on_each_device([&](const device& device) {
        check_limit("storage", &loader_report::storage_wait, [&](milliseconds slowness) {
            rows->before_read = [=](std::uint64_t) { block_for(slowness); };
            return report_of(rows, device);
        });
    });
}

TEST_CASE("report: time in a source that computes counts as CPU") {
    const auto rows = std::make_shared<scripted_rows>(batch_rows * batch_count);
    on_each_device([&](const device& device) {
        check_limit("CPU", &loader_report::cpu_wait, [&](milliseconds slowness) {
            rows->before_read = [=](std::uint64_t) { compute_for(slowness); };
            return report_of(rows, device);
        });
    });
}

TEST_CASE("report: time in an order that is slow to compute counts as CPU") {
    class slow_order final : public row_sequence {
     public:
        explicit slow_order(milliseconds slowness) : slowness_(slowness) {}
        std::string name() const override { return "slow/1"; }
        std::uint64_t position_count() const override { return batch_rows * batch_count; }
        void rows_at(std::uint64_t, std::uint64_t first, std::span<std::uint64_t> rows) const override {
            compute_for(slowness_);
            for (std::uint64_t& row : rows)
                row = first++;
        }

     private:
        milliseconds slowness_;
    };
    check_limit("CPU", &loader_report::cpu_wait, [](milliseconds slowness) {
        const array rows = numbered_rows(batch_rows * batch_count);
        loader loader({rows}, {.device = device::host(),
                               .batch_rows = batch_rows,
                               .sampler = sampler::custom(batch_rows * batch_count,
                                                          std::make_shared<slow_order>(slowness))});
        while (loader.next()) {
        }
        return loader.report();
    });
}

TEST_CASE("report: a consumer that computes is the limit, and the loader waits for it") {
    const array rows = numbered_rows(batch_rows * batch_count);
    on_each_device([&](const device& device) {
        check_limit("consumer", &loader_report::consumer_wait, [&](milliseconds slowness) {
            return report_of(rows, device, route::automatic, [=](stream_view) { compute_for(slowness); });
        });
    });
}

TEST_CASE("report: a consumer whose stream lags is the limit, although its thread waits") {
    const array rows = numbered_rows(batch_rows * batch_count);
    on_each_device([&](const device& device) {
        check_limit("consumer", &loader_report::consumer_wait, [&](milliseconds slowness) {
            return report_of(rows, device, route::automatic, [=](stream_view stream) {
                stream.host_function_async([=] { compute_for(slowness); });
            });
        });
    });
}

TEST_CASE("report: batches not yet taken count as waiting for the consumer, also during the wait") {
    // all of it fits into the slots, so that the loader is done soon
    loader loader({numbered_rows(40)}, {.device = device::host(), .batch_rows = 10, .slots = 8});
    CHECK(loader.report().wall_time == std::chrono::nanoseconds(0));
    CHECK(contains(loader.report().verdict(), "no batch has been requested"));
    auto batch = loader.next();
    while (loader.report().consumer_wait.count() == 0)
        std::this_thread::yield();
    const auto before = loader.report().wall_time;
    while (loader.report().wall_time < 4 * before) {
    }
    const loader_report meanwhile = loader.report();
    CHECK(is_limit(meanwhile, "consumer"));
    CHECK(2 * meanwhile.consumer_wait > meanwhile.wall_time);
    for (int i = 0; i < 3; ++i)
        batch = loader.next();
    CHECK_FALSE(loader.next().has_value());
    const loader_report report = loader.report();
    CHECK(is_limit(report, "consumer"));
    compute_for(milliseconds(5));
    CHECK(loader.report().wall_time == report.wall_time);  // the report ends with the end of the data
}

TEST_CASE("report: says how many batches were ready") {
    loader loader({numbered_rows(40)}, {.device = device::host(), .batch_rows = 10, .slots = 4});
    static_cast<void>(loader.next());
    // wait until every free slot holds a ready batch
    while (loader.report().consumer_wait.count() == 0)
        std::this_thread::yield();
    for (int i = 0; i < 3; ++i)
        CHECK(loader.next().has_value());
    const loader_report report = loader.report();
    // the last three calls found 3, 2 and 1 ready batches, the first one 0 to 4
    CHECK(report.max_ready >= 3);
    CHECK(report.max_ready <= 4);
    CHECK(report.mean_ready >= 6.0 / 4);
    CHECK(report.mean_ready <= 10.0 / 4);
    CHECK(report.bytes_per_second() > 0);
}
