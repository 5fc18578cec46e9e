#include <doctest/doctest.h>

#include <chrono>
#include <memory>
#include <thread>

#include "arrays.hpp"
#include "pinflow/loader/loader.hpp"

using namespace pinflow;

TEST_CASE("loader: says whom it waited for when the consumer is slow") {
    on_each_device([](const device& device) {
        const auto source = std::make_shared<scripted_rows>(100);
        loader loader({source}, {.device = device, .batch_rows = 10, .slots = 2});
        const stream stream(device);
        gate gate;
        hold(stream, gate);
        for (int i = 0; i < 2; ++i) {
            loader.next(stream);
        }
        std::thread opener([&] {
            // long enough to be seen in the report, however busy the machine is
            const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
            while (std::chrono::steady_clock::now() < until) {
                std::this_thread::yield();
            }
            gate.open();
        });
        while (loader.next(stream)) {
        }
        opener.join();
        const loader_report report = loader.report();
        CHECK(report.consumer_wait > std::chrono::milliseconds(25));
        CHECK(report.consumer_wait > report.storage_wait + report.cpu_wait);
    });
}
