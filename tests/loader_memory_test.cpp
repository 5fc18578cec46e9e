#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/rows.hpp"
#include "src/core/memory_limits.hpp"
#include "tests/support/file_bytes.hpp"

// Loaders and row exchanges if memory is short.
using namespace pinflow;
using detail::scoped_available_memory;

namespace {

constexpr std::uint64_t mebibyte = 1 << 20;
constexpr std::uint64_t row_bytes = 64 << 10;

/// 64 MiB: 1024 rows of 64 KiB, so that a batch of 64 rows has 4 MiB.
std::shared_ptr<const row_source> large_rows() {
    static const array rows(memory_region::anonymous(64 * mebibyte), dtype::of<std::byte>(),
                            {1024, row_bytes});
    return rows.rows();
}

loader_options on_host() {
    loader_options options;
    options.device = device::host();
    options.route = route::copy;
    return options;
}

}  // namespace

TEST_CASE(
    "loader memory: by default a loader takes at most half of the memory left, and reports missing slots") {
    const auto sources = large_rows();
    unsigned usual = 0;
    {
        const scoped_available_memory plenty(1 << 30);
        const loader batches({sources}, on_host());
        usual = batches.report().slots;
        CHECK(usual == 8);
        CHECK(batches.report().slots_reason.empty());
    }
    const scoped_available_memory little(26 * mebibyte);
    loader batches({sources}, on_host());
    CHECK(batches.report().slots == 3);
    CHECK(contains(batches.report().slots_reason, "3 slots instead of " + std::to_string(usual)));
    CHECK(contains(batches.report().slots_reason, "half of the " + std::to_string(26 * mebibyte)));
    REQUIRE(batches.next());
    CHECK(contains(batches.report().verdict(), batches.report().slots_reason));
}

TEST_CASE(
    "loader memory: a loader takes two slots even if they exceed half of the memory left, but not all of "
    "it") {
    const auto sources = large_rows();
    {
        const scoped_available_memory little(9 * mebibyte);
        CHECK(loader({sources}, on_host()).report().slots == 2);
    }
    const scoped_available_memory less(7 * mebibyte);
    const std::string sentence = message_of<system_failure>([&] { loader({sources}, on_host()); });
    CAPTURE(sentence);
    CHECK(contains(sentence, std::to_string(7 * mebibyte)));
    CHECK(contains(sentence, "2 slots"));
    CHECK(contains(sentence, "batches smaller"));
    loader_options smaller = on_host();
    smaller.batch_rows = 32;
    CHECK(loader({sources}, smaller).report().slots == 2);
}

TEST_CASE(
    "loader memory: explicit slots and threads that do not fit are refused; memory_bytes is only an upper "
    "bound") {
    const auto sources = large_rows();
    const scoped_available_memory available(30 * mebibyte);
    loader_options options = on_host();
    options.slots = 7;
    CHECK(loader({sources}, options).report().slots == 7);
    options.slots = 8;
    CHECK(contains(message_of<system_failure>([&] { loader({sources}, options); }), "8 slots"));
    // memory_bytes above the memory left is no error: the loader takes less
    options = on_host();
    options.memory_bytes = 64 * mebibyte;
    const loader bounded({sources}, options);
    CHECK(bounded.report().slots == 7);
    CHECK(contains(bounded.report().slots_reason, "7 slots instead of 8"));
    // a bound below two slots is an invalid argument, not a lack of memory
    options.memory_bytes = mebibyte;
    CHECK_THROWS_AS(loader({sources}, options), invalid_argument);
    options = on_host();
    options.threads = 1000;
    CHECK(contains(message_of<system_failure>([&] { loader({sources}, options); }), "1000 threads"));
}

TEST_CASE("loader memory: slots of one loader count for the next one before they are filled") {
    const auto sources = large_rows();
    const std::uint64_t before = detail::region_memory_bytes;
    loader_options options = on_host();
    options.slots = 4;
    const loader batches({sources}, options);
    CHECK(detail::region_memory_bytes >= before + 4 * 64 * row_bytes);
}

TEST_CASE("loader memory: buffers and threads that do not fit are refused; staging takes what there is") {
    const stream stream(device::host());
    const scoped_available_memory available(10 * mebibyte);
    CHECK_NOTHROW(device_buffer(10 * mebibyte, stream));
    CHECK_THROWS_AS(device_buffer(11 * mebibyte, stream), system_failure);
    CHECK_THROWS_AS(pinned_buffer(11 * mebibyte, device::host()), system_failure);
    // staging takes what there is
    std::vector<std::byte> memory(256 * row_bytes, std::byte{7});
    std::vector<std::byte> destination(row_bytes);
    row_exchange exchange(row_table(memory, row_bytes), device::host(), {.route = row_route::staged});
    const std::vector<std::uint64_t> ids{9};
    exchange.gather(ids, destination.data());
    CHECK(destination.back() == std::byte{7});
    CHECK_THROWS_AS(row_exchange(row_table(memory, row_bytes), device::host(), {.threads = 1000}),
                    system_failure);
    // the host device copies rows of memory directly: a call of 16 MiB takes no memory for them
    row_exchange planned(row_table(memory, row_bytes), device::host());
    std::vector<std::uint64_t> all(256);
    std::vector<std::byte> rows(256 * row_bytes);
    planned.gather(all, rows.data());
    CHECK(rows.back() == std::byte{7});
}
