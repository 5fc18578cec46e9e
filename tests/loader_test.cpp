#include "pinflow/loader/loader.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;

TEST_CASE("loader: delivers every row once an epoch, as it lies in the source") {
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

TEST_CASE("loader: its destructor does not wait for a consumer's stream that is stuck" * copies_held_back) {
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

TEST_CASE("loader: may be asked from several threads, which share the rows") {
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

TEST_CASE("loader: no rows, no epochs and a dropped tail that is everything end at once") {
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
        for (const std::uint64_t width : {4U, 8192U}) {  // gathered for a GPU, and taken from pages
            loader beside({numbered_rows(10, width), nothing},
                          {.device = device, .batch_rows = 4, .pin_budget_bytes = generous_pin_budget});
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

TEST_CASE("loader: refuses what contradicts itself, in a sentence") {
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
        CHECK(refuses({numbered_rows(3), numbered_rows(4)}, {}, "equal row counts"));
        CHECK(refuses({numbered_rows(3)}, {.batch_rows = 0}, "at least one row"));
        CHECK(refuses({numbered_rows(3)}, {.slots = 1}, "at least 2 slots"));
        CHECK(refuses({numbered_rows(100, 1000)}, {.memory_bytes = 1000}, "do not fit into 1000 bytes"));
        CHECK(refuses({numbered_rows(3)}, {.batch_rows = 1, .epochs = ~std::uint64_t{0}}, "too many"));
        CHECK(refuses({numbered_rows(3)}, {.route = route::read}, "no file to read from"));
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

TEST_CASE("loader: its memory is bounded by the slots it says it has") {
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
        // what the automatic route takes: on a GPU a host side beside the device side, for rows of pages that
        // are not registered yet
        const unsigned sides = device.kind() == device_kind::host ? 1U : 2U;
        const std::uint64_t memory_bytes = 1100 * 1024;
        const loader chosen({rows}, {.device = device, .batch_rows = 100, .memory_bytes = memory_bytes});
        CHECK(chosen.report().slots == (sides == 1 ? 8U : 5U));
        CHECK(chosen.report().slots * chosen.report().slot_bytes * sides <= memory_bytes);
    });
}

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

TEST_CASE(
    "loader: on the direct route, a batch may end on the stream that reads it, as the last of everything") {
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
    "loader: on the direct route, the mapping stays until the streams have passed, without anybody waiting") {
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

TEST_CASE("loader: the lists of rows count as its memory too") {
    on_each_device([](const device& device) {
        CHECK_THROWS_AS(loader({array_of(std::vector<std::uint8_t>(100'000), {100'000})},
                               {.device = device, .batch_rows = 50'000, .memory_bytes = 150'000}),
                        invalid_argument);
        CHECK_THROWS_AS(loader({nullptr}, {.device = device}), invalid_argument);
    });
}

namespace {

/// What a forked process finds. @return 0, or the number of the step that went wrong.
int use_in_child(std::unique_ptr<loader>& parents, std::optional<batch>& held, const stream& stream,
                 const array& rows) {
    const auto refused = [](auto function) {
        try {
            function();
        } catch (const device_error& error) {
            return std::string(error.what()).find("forked") != std::string::npos;
        } catch (...) {  // nothing must get out of the child
            return false;
        }
        return false;
    };
    if (!refused([&] { parents->next(); })) return 1;
    if (!refused([&] { parents->next(stream); })) return 2;
    if (!refused([&] { static_cast<void>(parents->state()); })) return 5;
    if (!refused([&] { static_cast<void>(held->state()); })) return 6;
    if (stream.device().kind() == device_kind::cuda) {
        // no call reaches CUDA, where it might hang
        if (!refused([&] { stream.synchronize(); })) return 3;
        if (!refused([&] { loader({rows}, {.device = stream.device()}); })) return 4;
    }
    held.reset();
    parents.reset();
    return 0;
}

}  // namespace

TEST_CASE("loader: a forked process is told that it cannot use it, and ends, while its parent goes on") {
    const temporary_folder folder;
    // rows that a GPU takes from the mapped pages, and ones that are gathered in memory of the parent's own
    write_npy(folder / "large.npy", numbered_rows(100, 8192).view());
    const array large = open_npy(folder / "large.npy");
    const array small = numbered_rows(100);
    on_each_device([&](const device& device) {
        for (const array& rows : {large, small}) {
            const stream stream(device);
            auto parents = std::make_unique<loader>(std::vector<std::shared_ptr<const row_source>>{rows},
                                                    loader_options{.device = device,
                                                                   .batch_rows = 10,
                                                                   .order = order::shuffled,
                                                                   .epochs = 3,
                                                                   .slots = 3,
                                                                   .pin_budget_bytes = generous_pin_budget});
            auto held = parents->next(stream);
            REQUIRE(held);
            int parent_lives[2] = {-1, -1};
            REQUIRE(::pipe(parent_lives) == 0);
            const ::pid_t child = ::fork();
            REQUIRE(child >= 0);
            if (child == 0) {
                ::alarm(60);  // a call that hangs ends the process, and fails the test
                ::close(parent_lives[1]);
                const int wrong_step = use_in_child(parents, held, stream, rows);
                char nothing = 0;
                [[maybe_unused]] const auto end = ::read(parent_lives[0], &nothing, 1);  // the parent is done
                ::_exit(wrong_step);
            }
            ::close(parent_lives[0]);
            CHECK(holds_its_rows(*held, stream));
            held.reset();
            std::uint64_t seen = 0;
            // fork makes private pages copy-on-write: those that are locked must stay the parent's own
            while (const auto batch = parents->next(stream)) {
                CHECK(holds_its_rows(*batch, stream));
                seen += batch->row_count();
            }
            CHECK(seen == 290);
            ::close(parent_lives[1]);
            int status = -1;
            REQUIRE(::waitpid(child, &status, 0) == child);
            CHECK(WIFEXITED(status));
            CHECK(WEXITSTATUS(status) == 0);
        }
    });
}
