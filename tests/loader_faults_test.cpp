#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loader/stage_seam.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/core/system.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;
using detail::stage;

namespace {

/// A GPU gathers rows of 512 bytes with a kernel, and copies rows of 64 KiB with the copy engine.
constexpr std::uint64_t small_width = 64;
constexpr std::uint64_t large_width = 8192;

/// How often a loader is destroyed at a random moment. PINFLOW_TEST_DESTRUCTIONS sets another number.
int destructions(const device& device) {
    const char* const asked = std::getenv("PINFLOW_TEST_DESTRUCTIONS");
    if (asked != nullptr) return std::atoi(asked);
    return device.kind() == device_kind::host ? 500 : 100;  // page-locking slots takes its time
}

}  // namespace

TEST_CASE(
    "loader: an exception in any stage of any batch reaches the consumer once, after the batches before it") {
    on_each_device([](const device& device) {
        const auto throws_in = [&](stage where, std::uint64_t when, route route, unsigned threads) {
            CAPTURE(static_cast<int>(where));
            CAPTURE(when);
            CAPTURE(to_string(route));
            CAPTURE(threads);
            const detail::scoped_stage_hook hook([&](stage at, std::uint64_t batch) {
                if (at == where && batch == when) throw std::runtime_error("thrown by the test");
            });
            // rows of 4 KiB, which a GPU gathers from registered pages
            loader loader({numbered_rows(200, 512)}, {.device = device,
                                                      .batch_rows = 10,
                                                      .route = route,
                                                      .threads = threads,
                                                      .pin_budget_bytes = generous_pin_budget});
            const stream stream(device);
            std::uint64_t batches = 0;
            std::string caught;
            try {
                while (const auto batch = loader.next(stream)) {
                    CHECK(batch->index() == batches);
                    CHECK(holds_its_rows(*batch, stream));
                    ++batches;
                }
            } catch (const std::runtime_error& error) {
                caught = error.what();
            }
            CHECK(caught == "thrown by the test");
            CHECK(batches == when);
            CHECK_FALSE(loader.next(stream).has_value());
            CHECK_FALSE(loader.next(stream).has_value());
        };
        for (const unsigned threads : {1U, 4U}) {
            for (const stage where : {stage::sample, stage::fill, stage::deliver}) {
                for (const std::uint64_t when : {0U, 7U, 19U}) {
                    throws_in(where, when, route::automatic, threads);
                    throws_in(where, when, route::staged, threads);
                }
            }
        }
    });
}

TEST_CASE("loader: an error that is never fetched does not block its destructor") {
    on_each_device([](const device& device) {
        const detail::scoped_stage_hook hook([](stage at, std::uint64_t batch) {
            if (at == stage::fill && batch == 1) throw std::runtime_error("thrown by the test");
        });
        for (int i = 0; i < 20; ++i) {
            loader loader({numbered_rows(200)}, {.device = device, .batch_rows = 10});
        }
        loader loader({numbered_rows(200)}, {.device = device, .batch_rows = 10});
        CHECK(loader.next().has_value());
    });
}

TEST_CASE("loader: works with one thread whatever the consumer holds, and when it never takes anything") {
    on_each_device([](const device& device) {
        for (const route route : {route::automatic, route::staged}) {
            const loader_options options{.device = device,
                                         .batch_rows = 64,
                                         .order = order::shuffled,
                                         .route = route,
                                         .slots = 3,
                                         .threads = 1};
            const array rows =
                numbered_rows(64 * 12, 8192);  // 4 MiB a batch: several pieces for the one thread
            {
                const loader never_asked({rows}, options);
            }
            loader loader({rows}, options);
            const stream stream(device);
            std::vector<batch> leased;
            std::uint64_t batches = 0;
            for (;;) {
                if (leased.size() == 3) {
                    if (batches < 12) CHECK_THROWS_AS(loader.next(stream), all_slots_leased);
                    leased.erase(leased.begin());
                }
                auto batch = loader.next(stream);
                if (!batch) break;
                CHECK(holds_its_rows(*batch, stream));
                leased.push_back(std::move(*batch));
                ++batches;
            }
            CHECK(batches == 12);
        }
    });
}

TEST_CASE("loader: can be destroyed at any moment") {
    const temporary_folder folder;
    write_npy(folder / "large.npy", numbered_rows(500, large_width).view());
    const array large = open_npy(folder / "large.npy");
    const array small = numbered_rows(500, small_width);
    on_each_device([&](const device& device) {
        std::mt19937 engine(1);
        const auto random = [&] { return static_cast<unsigned>(engine()); };
        const stream stream(device);
        const int count = destructions(device);
        for (int i = 0; i < count; ++i) {
            const std::uint64_t taken = random() % 7;
            const stage where = static_cast<stage>(random() % 3);
            gate reached;
            const detail::scoped_stage_hook hook([&](stage at, std::uint64_t batch) {
                if (at == where && batch == taken) reached.open();
            });
            std::vector<batch> leased;
            {
                // when large: from pages that may be about to be registered
                loader loader({random() % 4 == 0 ? large : small},
                              {.device = device,
                               .batch_rows = 10,
                               .order = order::shuffled,
                               .route = random() % 2 == 0 ? route::automatic : route::staged,
                               .slots = 2 + random() % 3,
                               .threads = 1 + random() % 3,
                               .pin_budget_bytes = generous_pin_budget});
                for (std::uint64_t b = 0; b < taken; ++b) {
                    auto batch = loader.next(stream);
                    if (batch && leased.empty() && random() % 2 == 0) leased.push_back(std::move(*batch));
                }
                // half of the loaders are destroyed only once the next batch is in that stage or past it
                if (random() % 2 == 0) reached.wait();
            }
            if (!leased.empty() && i % 10 == 0) CHECK(holds_its_rows(leased[0], stream));
        }
        stream.synchronize();
    });
}

TEST_CASE(
    "loader: an error while reading carries the file's name, and no batch with wrong rows is delivered") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(1000, small_width).view());
    on_each_device([&](const device& device) {
        for (const route route : {route::automatic, route::staged, route::read}) {
            CAPTURE(to_string(route));
            const array rows = open_npy(folder / "rows.npy");
            std::atomic<int> reads = 0;
            const detail::system::scoped_failure_hook hook(
                [&](detail::system::call what, std::string_view path) {
                    const bool ours = what == detail::system::call::pread && path.ends_with("rows.npy");
                    return detail::system::injected_failure{.error = ours && ++reads > 35 ? EIO : 0};
                });
            loader loader({rows},
                          {.device = device, .batch_rows = 10, .order = order::shuffled, .route = route});
            const stream stream(device);
            std::uint64_t batches = 0;
            std::string sentence;
            try {
                while (const auto batch = loader.next(stream)) {
                    CHECK(holds_its_rows(*batch, stream));
                    ++batches;
                }
            } catch (const system_failure& failure) {
                sentence = failure.what();
            }
            CHECK(batches <= 3);  // each takes ten reads, and they are made side by side
            CHECK(sentence.find("rows.npy': Input/output error") != std::string::npos);
            CHECK(sentence.starts_with("cannot read 512 bytes at offset "));
            CHECK_FALSE(loader.next(stream).has_value());
        }
    });
}

TEST_CASE("loader: an error while reading does not concern a GPU that takes the rows from registered pages") {
    if (device::cuda_count() == 0) {
        MESSAGE("skipped: there is no CUDA device");
        return;
    }
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100, large_width).view());
    const array rows = open_npy(folder / "rows.npy");
    const detail::system::scoped_failure_hook hook([](detail::system::call what, std::string_view path) {
        const bool ours = what == detail::system::call::pread && path.ends_with("rows.npy");
        return detail::system::injected_failure{.error = ours ? EIO : 0};
    });
    loader loader({rows}, {.device = device::cuda(0),
                           .batch_rows = 10,
                           .route = route::copy,
                           .pin_budget_bytes = generous_pin_budget});
    const stream stream(device::cuda(0));
    std::uint64_t batches = 0;
    while (const auto batch = loader.next(stream)) {
        CHECK(holds_its_rows(*batch, stream));
        ++batches;
    }
    CHECK(batches == 10);
}

TEST_CASE("loader: short reads are continued") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100, 64).view());
    const array rows = open_npy(folder / "rows.npy");
    const detail::system::scoped_failure_hook hook([](detail::system::call what, std::string_view) {
        return detail::system::injected_failure{
            .max_bytes = what == detail::system::call::pread ? std::size_t{100} : ~std::size_t{0}};
    });
    on_each_device([&](const device& device) {
        loader loader({rows}, {.device = device, .batch_rows = 10});
        const stream stream(device);
        std::uint64_t batches = 0;
        while (const auto batch = loader.next(stream)) {
            CHECK(holds_its_rows(*batch, stream));
            ++batches;
        }
        CHECK(batches == 10);
    });
}

TEST_CASE("loader: a file that shrinks, is modified or is replaced in an epoch is a typed error") {
    const temporary_folder folder;
    const auto path = folder / "rows.npy";
    const auto disturb = [&](int how, std::uint64_t width) {
        if (how == 0) std::filesystem::resize_file(path, 0);
        if (how == 1) std::filesystem::resize_file(path, std::filesystem::file_size(path) - 5000);
        if (how == 2) {
            std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
            file.seekp(200);
            file.put('x');
        }
        if (how == 3) {
            write_npy(folder / "other.npy", numbered_rows(200, width).view());
            std::filesystem::rename(folder / "other.npy", path);
        }
    };
    on_each_device([&](const device& device) {
        const auto is_noticed = [&](int how, std::uint64_t width, route route) {
            CAPTURE(how);
            CAPTURE(width);
            CAPTURE(to_string(route));
            write_npy(path, numbered_rows(200, width).view());
            // written long ago, so that a change shows however coarse the filesystem's clock is
            std::filesystem::last_write_time(
                path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
            loader loader({open_npy(path)}, {.device = device,
                                             .batch_rows = 10,
                                             .route = route,
                                             .slots = 2,
                                             .threads = 4,  // with 10 or more, one epoch is read with pread
                                             .pin_budget_bytes = generous_pin_budget});
            const stream stream(device);
            {
                const auto first = loader.next(stream);
                REQUIRE(first);
                CHECK(holds_its_rows(*first, stream));
            }
            disturb(how, width);
            CHECK_THROWS_AS(
                [&] {
                    while (loader.next(stream)) {
                    }
                }(),
                data_changed);
            CHECK_FALSE(loader.next(stream).has_value());
        };
        for (int how = 0; how < 4; ++how) {
            is_noticed(how, small_width, route::staged);
            // pages are registered before or as the epoch begins; the device keeps them when the file loses
            // them
            is_noticed(how, large_width, route::automatic);
            is_noticed(how, large_width, route::copy);
        }
    });
}

TEST_CASE("loader: time spent waiting for storage is reported as such") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100, 64).view());
    const array rows = open_npy(folder / "rows.npy");
    std::chrono::milliseconds slowness{};
    const detail::system::scoped_failure_hook hook([&](detail::system::call what, std::string_view) {
        if (what == detail::system::call::pread) {  // a disk that takes its time
            std::mutex mutex;
            std::unique_lock lock(mutex);
            std::condition_variable nothing;
            nothing.wait_for(lock, slowness, [] { return false; });
        }
        return detail::system::injected_failure{};
    });
    on_each_device([&](const device& device) {
        // a GPU would gather rows as small as these from the pages
        const route reading = device.kind() == device_kind::host ? route::automatic : route::read;
        bool is_the_storages = false;
        for (const int milliseconds : {5, 25, 125}) {  // longer, if other work takes the CPU
            slowness = std::chrono::milliseconds(milliseconds);
            loader loader({rows}, {.device = device, .batch_rows = 10, .route = reading, .threads = 1});
            const stream stream(device);
            while (loader.next(stream)) {
            }
            const loader_report report = loader.report();
            CHECK(report.storage_wait > std::chrono::milliseconds(10));
            is_the_storages = report.storage_wait > 4 * report.cpu_wait;
            if (is_the_storages) break;
        }
        CHECK(is_the_storages);
    });
}
