#include "src/rows/call_errors.hpp"

#include <doctest/doctest.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"

using namespace pinflow;
using detail::call_errors;
using detail::index_errors;
using detail::pending_call;

namespace {

struct logged {
    explicit logged(const device& device) : log(device), stream(device) {}

    /// A call of 10 indices to a table of 5 rows, with so many wrong ones, the first at position 3.
    std::shared_ptr<pending_call> add(unsigned outside, unsigned repeated = 0, bool is_listed = true) {
        auto call = log.begin();
        CHECK(call->errors()->outside_count == 0);
        CHECK(call->errors()->repeated_count == 0);
        *call->errors() = {.outside_count = outside,
                           .outside_complement = ~3ULL,
                           .repeated_count = repeated,
                           .repeated_complement = ~4ULL,
                           .outside_id = 70 + outside,
                           .repeated_id = 2};
        log.expect(call, "rows were not moved", 10, 5, stream, is_listed);
        return call;
    }
    std::string checked() {
        return sentence_of<error>([&] { log.check(); });
    }
    std::string checked(pending_call& call) {
        return sentence_of<error>([&] { log.check(call); });
    }

    call_errors log;
    pinflow::stream stream;
};

}  // namespace

TEST_CASE("call_errors: reports each call with errors once, in the order of the calls") {
    on_each_device([](const device& device) {
        logged with(device);
        with.log.check();
        with.add(1);
        with.add(0);
        with.add(2, 1);
        with.add(0, 3);
        with.stream.synchronize();
        CHECK(contains_all(with.checked(), {"rows were not moved", "1 of 10", "is outside", "has 5 rows",
                                            "the first is 71,", "at position 3"}));
        CHECK(contains_all(with.checked(), {"rows were not moved", "2 of 10", "are outside", "has 5 rows",
                                            "the first is 72,", "at position 3"}));
        CHECK(contains_all(with.checked(), {"rows were not moved", "3 of 10", "occurred before",
                                            "duplicate_policy::error", "the first is 2,", "at position 4"}));
        CHECK(with.checked().empty());
    });
}

TEST_CASE("call_errors: does not report a call before its stream has reached it, but reports other calls") {
    on_each_device([](const device& device) {
        logged with(device);
        const stream stuck(device);
        gate gate;
        hold(stuck, gate);
        const auto late = with.log.begin();
        *late->errors() = {.outside_count = 1, .outside_complement = ~0ULL, .outside_id = 99};
        with.log.expect(late, "late", 1, 1, stuck);
        CHECK(with.checked().empty());
        with.add(1);
        with.stream.synchronize();
        CHECK(contains(with.checked(), "the first is 71"));
        CHECK(with.checked().empty());
        gate.open();
        stuck.synchronize();
        CHECK(contains(with.checked(), "late: 1 of 1 row numbers is outside"));
        CHECK(with.checked().empty());
    });
}

TEST_CASE("call_errors: a call that is not listed reports to its handle only") {
    on_each_device([](const device& device) {
        logged with(device);
        const auto first = with.add(1, 0, false);
        const auto second = with.add(2);
        const auto third = with.add(3, 0, false);
        with.stream.synchronize();
        CHECK(contains(with.checked(*third), "the first is 73"));
        CHECK(contains(with.checked(), "the first is 72"));
        CHECK(with.checked().empty());
        CHECK(with.checked(*second).empty());
        with.log.close();
        CHECK(contains(with.checked(*first), "the first is 71"));
        CHECK(with.checked(*first).empty());
    });
}

TEST_CASE("call_errors: the first exception of a thread is reported, before wrong indices") {
    on_each_device([](const device& device) {
        logged with(device);
        const auto call = with.add(1);
        std::vector<std::thread> threads;
        for (int i = 0; i < 4; ++i) {
            threads.emplace_back([&] {
                for (int n = 0; n < 100; ++n)
                    call->add(std::make_exception_ptr(device_error("thrown by a thread")));
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        with.stream.synchronize();
        CHECK(with.checked() == "thrown by a thread");
        CHECK(with.checked().empty());
    });
}

TEST_CASE("call_errors: a forgotten call is not reported, and its memory is reused") {
    on_each_device([](const device& device) {
        logged with(device);
        const auto forgotten = with.log.begin();
        forgotten->errors()->outside_count = 1;
        with.log.forget(*forgotten, with.stream);
        with.stream.synchronize();
        CHECK(with.checked().empty());
        CHECK(with.log.begin()->errors() == forgotten->errors());

        // the memory of calls that were told, too
        logged another(device);
        const index_errors* const memory = another.add(1)->errors();
        another.stream.synchronize();
        CHECK_FALSE(another.checked().empty());
        CHECK(another.add(0)->errors() == memory);
    });
}

TEST_CASE("call_errors: negative row numbers are spelled as such") {
    CHECK(contains_all(detail::outside_sentence("it", 2, 3, 4, ~std::uint64_t{0}, 1),
                       {"it: ", "2 of 3", "are outside", "has 4 rows", "the first is -1,", "at position 1"}));
    CHECK(contains(detail::outside_sentence("it", 1, 3, 4, (std::uint64_t{1} << 63) - 1, 1),
                   "the first is 9223372036854775807"));
}
