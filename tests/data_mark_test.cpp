#include "loader/data_mark.hpp"

#include <doctest/doctest.h>

#include <chrono>

#include "tests/support/devices.hpp"

using namespace pinflow;

TEST_CASE(
    "data_mark: a mark of two streams is done, and a waiting stream goes on, once both have passed it") {
    on_each_device([](const device& device) {
        for (const bool first_is_late : {true, false}) {
            CAPTURE(first_is_late);
            const gate late;
            const stream first(device);
            const stream second(device);
            const stream reader(device);
            detail::data_mark mark(device);
            (first_is_late ? first : second).host_function_async(late.waiter());
            mark.record(first, second.view());
            mark.hold_up(reader);
            (first_is_late ? second : first).synchronize();
            CHECK_FALSE(mark.done());
            CHECK_FALSE(mark.synchronize_for(std::chrono::microseconds(1)));
            CHECK_FALSE(reader.done());
            late.open();
            reader.synchronize();
            CHECK(mark.done());
            CHECK(mark.known_done());
            mark.record(first);  // one stream again
            first.synchronize();
            CHECK(mark.done());
        }
    });
}
