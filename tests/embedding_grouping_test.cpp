#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/train/embedding_table.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/plain_embedding_table.hpp"
#include "tests/support/devices.hpp"

// Embedding tables whose device groups many ids that lie in host memory.

using namespace pinflow;

namespace {

constexpr std::size_t many = 9000;

/// Counts the groupings of the device, and can make them fail.
class grouping_backend : public fake_cuda_backend {
 public:
    bool fails = false;
    std::atomic<int> marks_left = -1;  ///< until an event cannot be recorded, once; -1: all can
    bool is_reached = true;
    unsigned groupings = 0;

    void group_rows(const detail::row_grouping& grouping, void* stream) override {
        if (fails) throw device_error("injected");
        ++groupings;
        fake_cuda_backend::group_rows(grouping, stream);
    }
    void record_event(void* event, void* stream) override {
        if (marks_left >= 0 && marks_left-- == 0) throw device_error("injected");
        fake_cuda_backend::record_event(event, stream);
    }
    detail::page_locker* locker() override { return is_reached ? fake_cuda_backend::locker() : nullptr; }
    bool reaches(const std::byte* data, std::uint64_t size_bytes) override {
        return is_reached && fake_cuda_backend::reaches(data, size_bytes);
    }
};

embedding_options table_options(std::uint64_t device_rows) {
    embedding_options options;
    options.row_count = 5000;
    options.columns = 3;
    options.weights = uniform_weights(-1, 1, 4);
    options.max_batch_ids = 10'000;
    options.device_rows = device_rows;
    return options;
}

std::set<std::uint64_t> different(const std::vector<std::uint64_t>& ids) {
    return {ids.begin(), ids.end()};
}

}  // namespace

TEST_CASE("embedding table: a GPU groups many ids in host memory, and the host learns the different ones") {
    for (const bool is_reached : {true, false}) {
        for (const std::uint64_t device_rows : {0U, 100U, 5000U}) {
            CAPTURE(is_reached);
            CAPTURE(device_rows);
            grouping_backend backend;
            backend.is_reached = is_reached;
            const stream stream(backend.device());
            embedding_table table(table_options(device_rows), backend.device());
            plain_table expected(table.options());
            std::mt19937_64 random(11);
            for (const std::size_t count : {many, std::size_t{100}, many + 1, many}) {
                const auto ids = random_ids(random, 5000, count);
                table.prefetch(ids);
                embedding_lease lease = table.fetch(ids, stream);
                CHECK(lease.row_count() == different(ids).size());
                CHECK(std::ranges::equal(lease.ids(), different(ids)));
                CHECK(std::ranges::equal(lease.ids(), different(ids)));
                const auto values = random_gradients(random, count * 3);
                const device_array gradients(values, stream);
                expected.step(ids, values);
                table.commit(std::move(lease), gradients.data(), dtype::of<float>(), stream);
                stream.synchronize();
                CHECK(weights_of(table, all_ids(5000)) == expected.weights_of(all_ids(5000)));
            }
            // where all rows are in device memory, there is nothing to reach
            CHECK(backend.groupings == (is_reached || device_rows == 5000 ? 3 : 0));
        }
    }
}

TEST_CASE("embedding table: fetch does not wait until the GPU has grouped the ids, but row_count does") {
    grouping_backend backend;
    const stream stream(backend.device());
    embedding_options options = table_options(0);
    options.look_ahead = 0;
    embedding_table table(options, backend.device());
    std::mt19937_64 random(12);
    const auto ids = random_ids(random, 5000, many);
    gate gate;
    hold(stream, gate);
    for (int i = 0; i < 2; ++i)  // the memory of both steps is used until the gate opens
        static_cast<void>(table.fetch(ids, stream));
    const embedding_lease lease = table.fetch(ids, stream);
    CHECK_FALSE(stream.done());
    gate.open();
    CHECK(lease.row_count() == different(ids).size());
}

TEST_CASE("embedding table: a step whose grouping cannot be enqueued is used again") {
    grouping_backend backend;
    const stream stream(backend.device());
    embedding_table table(table_options(0), backend.device());
    std::mt19937_64 random(13);
    const auto ids = random_ids(random, 5000, many);
    for (int round = 0; round < 6; ++round) {
        backend.fails = true;
        CHECK_THROWS_WITH_AS(table.prefetch(ids), "injected", device_error);
        CHECK_THROWS_WITH_AS(table.fetch(ids, stream), "injected", device_error);
        backend.fails = false;
        const auto others = random_ids(random, 5000, many);
        table.prefetch(others);
        CHECK(std::ranges::equal(table.fetch(others, stream).ids(), different(others)));
    }
}

TEST_CASE("embedding table: if an event cannot be recorded, the memory of its step is not used too early") {
    grouping_backend backend;
    const stream stream(backend.device());
    embedding_table table(table_options(100), backend.device());
    plain_table expected(table.options());
    std::mt19937_64 random(14);
    int thrown = 0;
    for (int marks = 0; marks < 12; ++marks) {
        CAPTURE(marks);
        const auto ids = random_ids(random, 5000, many);
        backend.marks_left = marks;
        for (int i = 0; i < 3; ++i) {
            try {
                table.prefetch(ids);
                static_cast<void>(table.fetch(ids, stream));
            } catch (const device_error&) {
                ++thrown;
            }
        }
        backend.marks_left = -1;
        table.cancel_prefetches();
        for (const std::size_t count : {std::size_t{100}, many}) {
            const auto others = random_ids(random, 5000, count);
            embedding_lease lease = table.fetch(others, stream);
            CHECK(std::ranges::equal(lease.ids(), different(others)));
            const auto values = random_gradients(random, count * 3);
            const device_array gradients(values, stream);
            expected.step(others, values);
            table.commit(std::move(lease), gradients.data(), dtype::of<float>(), stream);
            stream.synchronize();
            CHECK(weights_of(table, all_ids(5000)) == expected.weights_of(all_ids(5000)));
        }
    }
    CHECK(thrown > 5);
}

TEST_CASE("embedding table: the ids of a lease do not wait for later fetches") {
    grouping_backend backend;
    const stream stream(backend.device());
    const class stream blocked(backend.device());
    embedding_table table(table_options(0), backend.device());
    std::mt19937_64 random(15);
    const auto ids = random_ids(random, 5000, many);
    const embedding_lease lease = table.fetch(ids, stream);
    gate gate;
    hold(blocked, gate);
    const embedding_lease later = table.fetch(row_ids::on_device(ids.data(), many), blocked);
    CHECK(std::ranges::equal(lease.ids(), different(ids)));
    gate.open();
    table.synchronize();  // before the ids go
}

TEST_CASE("embedding table: growing decides anew whether the GPU groups ids") {
    grouping_backend backend;
    backend.is_reached = false;
    const stream stream(backend.device());
    embedding_table table(table_options(5000), backend.device());
    std::mt19937_64 random(16);
    const auto ids = random_ids(random, 5000, many);
    static_cast<void>(table.fetch(ids, stream));
    CHECK(backend.groupings == 1);
    table.grow(6000);  // these rows are in host memory
    const auto more = random_ids(random, 6000, many);
    CHECK(std::ranges::equal(table.fetch(more, stream).ids(), different(more)));
    CHECK(backend.groupings == 1);
}
