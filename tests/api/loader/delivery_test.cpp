#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"

using namespace pinflow;

TEST_CASE("loader: delivers every row once per epoch, as it is in the source") {
    on_each_device([](const device& device) {
        for (const order order : {order::sequential, order::shuffled}) {
            for (const std::uint64_t rows : {1U, 63U, 64U, 65U, 1000U}) {
                CAPTURE(rows);
                loader loader({numbered_rows(rows)},
                              {.device = device, .batch_rows = 64, .order = order, .seed = 5, .epochs = 3});
                CHECK(loader.row_count() == rows);
                CHECK(loader.batches_per_epoch() == (rows + 63) / 64);
                const stream stream(device);
                std::map<std::uint64_t, std::vector<std::uint64_t>> seen;
                while (const auto batch = loader.next(stream)) {
                    CHECK(holds_its_rows(*batch, stream));
                    auto& epoch = seen[batch->epoch()];
                    CHECK(epoch.size() == batch->index() * 64);
                    CHECK(batch->row_count() == std::min<std::uint64_t>(64, rows - epoch.size()));
                    epoch.insert(epoch.end(), batch->row_ids().begin(), batch->row_ids().end());
                }
                CHECK_FALSE(loader.next(stream).has_value());
                REQUIRE(seen.size() == 3);
                std::vector<std::uint64_t> all(rows);
                std::iota(all.begin(), all.end(), 0);
                for (auto& [epoch, ids] : seen) {
                    if (order == order::sequential) CHECK(ids == all);
                    std::ranges::sort(ids);
                    CHECK(ids == all);
                }
            }
        }
    });
}

TEST_CASE("loader: the first batch of a caller's own source does not wait for later ones") {
    on_each_device([](const device& device) {
        const auto source = std::make_shared<scripted_rows>(1000);
        std::atomic<bool> is_delivered = false;
        source->before_read = [&](std::uint64_t first_row) {
            if (first_row > 0) is_delivered.wait(false);
        };
        loader loader({source}, {.device = device, .batch_rows = 5, .threads = 2});
        CHECK(loader.wait_for(std::chrono::minutes(1)));
        is_delivered = true;
        is_delivered.notify_all();
        std::uint64_t rows = 0;
        while (const auto next = loader.next())
            rows += next->row_count();
        CHECK(rows == 1000);
    });
}

TEST_CASE("loader: a batch that is taken back comes again, and a state does not count it") {
    on_each_device([](const device& device) {
        const loader_options options{.device = device, .batch_rows = 10, .order = order::shuffled, .seed = 5};
        loader loader({numbered_rows(95)}, options);
        pinflow::loader other({numbered_rows(95)}, options);
        const stream stream(device);
        std::vector<std::uint64_t> seen;
        for (std::size_t step = 0; auto batch = loader.next(stream); ++step) {
            const std::vector<std::uint64_t> ids(batch->row_ids().begin(), batch->row_ids().end());
            if (step % 2 == 1) {
                loader.take_back(std::move(*batch));
                CHECK(loader.report().rows == seen.size());
                CHECK(loader.state().position == seen.size());
                batch = loader.next(stream);
                REQUIRE(batch.has_value());
                CHECK(std::ranges::equal(batch->row_ids(), ids));
            }
            CHECK(holds_its_rows(*batch, stream));
            seen.insert(seen.end(), ids.begin(), ids.end());
        }
        std::ranges::sort(seen);
        std::vector<std::uint64_t> all(95);
        std::iota(all.begin(), all.end(), 0);
        CHECK(seen == all);
        auto batch = other.next(stream);
        REQUIRE(batch.has_value());
        CHECK_THROWS_AS(loader.take_back(std::move(*batch)), invalid_argument);
        batch = other.next(stream);
        batch->release();
        CHECK_THROWS_AS(other.take_back(std::move(*batch)), invalid_argument);
    });
}

TEST_CASE("loader: keeps the arrays of a sample together, with their types and shapes") {
    on_each_device([](const device& device) {
        std::vector<float> images(50 * 2 * 3);
        std::iota(images.begin(), images.end(), 0.0F);
        std::vector<std::uint16_t> labels(50);
        std::iota(labels.begin(), labels.end(), std::uint16_t{1000});
        loader loader({array_of(images, {50, 2, 3}), array_of(labels, {50})},
                      {.device = device, .batch_rows = 8, .order = order::shuffled});
        const stream stream(device);
        std::size_t rows = 0;
        while (const auto batch = loader.next(stream)) {
            REQUIRE(batch->array_count() == 2);
            CHECK((*batch)[0].shape() == shape_vector{batch->row_count(), 2, 3});
            CHECK((*batch)[1].shape() == shape_vector{batch->row_count()});
            CHECK((*batch)[0].dtype().descr() == "<f4");
            CHECK((*batch)[1].dtype().descr() == "<u2");
            const auto image = elements_of<float>(*batch, 0, stream);
            const auto label = elements_of<std::uint16_t>(*batch, 1, stream);
            for (std::size_t i = 0; i < batch->row_count(); ++i) {
                CHECK(image[i * 6] == static_cast<float>(batch->row_ids()[i] * 6));
                CHECK(label[i] == 1000 + batch->row_ids()[i]);
            }
            CHECK_THROWS_AS((*batch)[2], invalid_argument);
            rows += batch->row_count();
        }
        CHECK(rows == 50);
    });
}

TEST_CASE("loader: several threads may call next, and share the rows") {
    on_each_device([](const device& device) {
        loader loader({numbered_rows(1000)},
                      {.device = device, .batch_rows = 7, .order = order::shuffled, .epochs = 2, .slots = 6});
        std::mutex mutex;
        std::vector<std::uint64_t> seen;
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; ++t) {
            threads.emplace_back([&] {
                const stream stream(device);
                while (const auto batch = loader.next(stream)) {
                    const bool right = holds_its_rows(*batch, stream);
                    const std::lock_guard lock(mutex);
                    CHECK(right);
                    seen.insert(seen.end(), batch->row_ids().begin(), batch->row_ids().end());
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        std::ranges::sort(seen);
        REQUIRE(seen.size() == 2000);
        for (std::size_t i = 0; i < seen.size(); ++i) {
            REQUIRE(seen[i] == i / 2);
        }
    });
}

TEST_CASE("loader: a dropped tail is the last rows of the order, and nothing else") {
    on_each_device([](const device& device) {
        loader loader({numbered_rows(25)},
                      {.device = device, .batch_rows = 10, .epochs = 2, .tail = tail::drop});
        const stream stream(device);
        std::vector<std::uint64_t> sizes;
        std::vector<std::uint64_t> first_rows;
        while (const auto batch = loader.next(stream)) {
            CHECK(holds_its_rows(*batch, stream));
            sizes.push_back(batch->row_count());
            first_rows.push_back(batch->row_ids()[0]);
        }
        CHECK(sizes == std::vector<std::uint64_t>{10, 10, 10, 10});
        CHECK(first_rows == std::vector<std::uint64_t>{0, 10, 0, 10});
    });
}

TEST_CASE("loader: ends at once without rows, without epochs, or if the dropped tail is everything") {
    on_each_device([](const device& device) {
        const stream stream(device);
        for (const loader_options& options :
             {loader_options{.device = device, .epochs = 0},
              loader_options{.device = device, .batch_rows = 11, .tail = tail::drop}}) {
            loader loader({numbered_rows(10)}, options);
            CHECK_FALSE(loader.next(stream).has_value());
            CHECK_FALSE(loader.next().has_value());
        }
        loader empty({numbered_rows(0)}, {.device = device, .epochs = 5});
        CHECK_FALSE(empty.next(stream).has_value());
    });
}

TEST_CASE("loader: rows without bytes are delivered all the same") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const array nothing = array_of<float>({}, {10, 0});
        loader alone({nothing}, {.device = device, .batch_rows = 4});
        std::uint64_t rows = 0;
        while (const auto batch = alone.next(stream)) {
            CHECK((*batch)[0].size_bytes() == 0);
            rows += batch->row_count();
        }
        CHECK(rows == 10);
        // for a GPU, the CPU gathers rows of 32 bytes; rows of 64 KiB are long enough for the copy engine
        for (const std::uint64_t width : {4U, 8192U}) {
            loader beside({numbered_rows(10, width), nothing},
                          {.device = device,
                           .batch_rows = 4,
                           .threads = 2,  // few, so that one epoch is worth page-locking
                           .pin_budget_bytes = generous_pin_budget});
            rows = 0;
            while (const auto batch = beside.next(stream)) {
                CHECK(holds_its_rows(*batch, stream));
                CHECK((*batch)[1].size_bytes() == 0);
                CHECK((*batch)[1].shape() == shape_vector{batch->row_count(), 0});
                rows += batch->row_count();
            }
            CHECK(rows == 10);
        }
    });
}
