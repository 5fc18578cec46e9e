#include <doctest/doctest.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/locking_backend.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"

// Loaders for a device that page-locks: who enqueues the copies of batches, and from which buffers.

using namespace pinflow;

TEST_CASE(
    "fake CUDA copies: two threads enqueue the 256 copies of a group if at most one group is being copied") {
    const temporary_folder folder;
    const numbered_file rows(folder, "rows.npy", 512, words_of_64k);
    locking_backend backend;
    std::mutex mutex;
    std::vector<std::size_t> calls;
    std::set<std::thread::id> threads;
    std::condition_variable begun;
    int begun_count = 0;
    backend.before_copies = [&](std::size_t count, void*) {
        std::unique_lock guard(mutex);
        ++begun_count;
        begun.notify_all();
        // so that neither thread makes both calls
        begun.wait_for(guard, std::chrono::seconds(20), [&] { return begun_count >= 2; });
        if (calls.size() < 2) threads.insert(std::this_thread::get_id());
        calls.push_back(count);
    };
    loader_options options = options_for(backend);
    options.batch_rows = 256;  // a group
    options.epochs = 1;
    options.route = route::copy;
    options.threads = 2;
    {
        loader batches({rows.open()}, options);
        CHECK(take_all(batches) == 512);
    }
    REQUIRE(calls.size() >= 2);
    CHECK(calls[0] == 128);
    CHECK(calls[1] == 128);
    CHECK(threads.size() == 2);
}

TEST_CASE(
    "fake CUDA copies: if one of two threads cannot enqueue its copies, next throws, and the loader ends") {
    const temporary_folder folder;
    const numbered_file rows(folder, "rows.npy", 512, words_of_64k);
    for (const int failing : {0, 1}) {
        CAPTURE(failing);
        locking_backend backend;
        std::atomic<int> calls = 0;
        backend.before_copies = [&](std::size_t, void*) {
            if (calls++ == failing) throw device_error("injected");
        };
        loader_options options = options_for(backend);
        options.batch_rows = 256;  // a group
        options.route = route::copy;
        options.threads = 2;
        loader batches({rows.open()}, options);
        const stream stream(backend.device());
        CHECK(message_of<device_error>([&] { batches.next(stream); }) == "injected");
        CHECK_FALSE(batches.next(stream));
    }
}

TEST_CASE("fake CUDA copies: rows that are read or staged are copied one staging buffer at a time") {
    const temporary_folder folder;
    // batches of 3 MiB, staging buffers of 2 MiB: two copies for each batch
    const numbered_file rows(folder, "rows.npy", 480, words_of_64k);
    for (const route route : {route::read, route::staged}) {
        CAPTURE(to_string(route));
        locking_backend backend;
        std::atomic<int> copies = 0;
        backend.before_copies = [&](std::size_t count, void*) { copies += static_cast<int>(count); };
        loader_options options = options_for(backend);
        options.batch_rows = 48;
        options.route = route;
        options.threads = 3;
        loader batches({rows.open()}, options);
        CHECK(take_all(batches) == 4 * 480);
        CHECK(copies == 4 * 10 * 2);
    }
}

TEST_CASE("fake CUDA copies: rows whose pages are not registered yet pass through staging buffers") {
    const temporary_folder folder;
    const numbered_file rows(folder, "rows.npy", 480, words_of_64k);
    for (const order order : {order::sequential, order::shuffled}) {
        locking_backend backend;
        backend.lock.permits = 0;
        std::atomic<int> copies = 0;
        backend.before_copies = [&](std::size_t, void*) { ++copies; };
        loader_options options = options_for(backend, order);
        options.batch_rows = 48;  // 3 MiB, so a batch passes through two buffers of 2 MiB
        options.threads = 4;
        loader batches({rows.open()}, options);
        CHECK(take_all(batches) == 4 * 480);
        CHECK(batches.report().arrays[0].transfer == "copy engine");
        CHECK(copies == 4 * 10 * 2);
        backend.lock.allow(1000);
    }
}

TEST_CASE("fake CUDA copies: shared staging buffers take the place of those in the slots") {
    const temporary_folder folder;
    const numbered_file rows(folder, "rows.npy", 480, words_of_64k);
    locking_backend backend;
    loader_options options = options_for(backend);
    options.batch_rows = 240;  // 15 MiB
    options.threads = 4;       // buffers of 16 MiB
    options.memory_bytes = std::uint64_t{64} << 20;
    loader batches({rows.open()}, options);
    CHECK(batches.report().slots == 3);
    CHECK(take_all(batches) == 4 * 480);
}

TEST_CASE(
    "fake CUDA copies: if rows in a staging buffer cannot be copied, next throws, and the loader ends") {
    const temporary_folder folder;
    const numbered_file rows(folder, "rows.npy", 480, words_of_64k);
    for (const int failing : {0, 1, 5}) {
        CAPTURE(failing);
        locking_backend backend;
        std::atomic<int> calls = 0;
        backend.before_copies = [&](std::size_t, void*) {
            if (calls++ == failing) throw device_error("injected");
        };
        loader_options options = options_for(backend, order::sequential);
        options.batch_rows = 48;
        options.route = route::read;
        options.threads = 2;
        options.slots = 2;
        loader batches({rows.open()}, options);
        const stream stream(backend.device());
        CHECK(message_of<device_error>([&] {
                  while (batches.next(stream)) {
                  }
              }) == "injected");
        CHECK_FALSE(batches.next(stream));
    }
}

TEST_CASE("fake CUDA copies: one thread enqueues the copies of a group while two groups are being copied") {
    const temporary_folder folder;
    const numbered_file rows(folder, "rows.npy", 512, words_of_64k);
    locking_backend backend;
    const gate copying;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::size_t> calls;
    backend.before_copies = [&](std::size_t count, void* stream) {
        const std::lock_guard guard(mutex);
        if (calls.size() < 2) backend.enqueue_host_function(stream, copying.waiter());
        calls.push_back(count);
        changed.notify_all();
    };
    loader_options options = options_for(backend);
    options.batch_rows = 256;  // a group
    options.epochs = 2;
    options.route = route::copy;
    options.threads = 2;
    loader batches({rows.open()}, options);
    {
        // two halves each of two groups, and two whole groups
        std::unique_lock lock(mutex);
        CHECK(changed.wait_for(lock, std::chrono::seconds(20), [&] { return calls.size() >= 6; }));
    }
    copying.open();
    CHECK(take_all(batches) == 2 * 512);
    REQUIRE(calls.size() == 6);
    for (const std::size_t half : {0U, 1U, 2U, 3U})
        CHECK(calls[half] <= 128);
    for (const std::size_t whole : {4U, 5U})
        CHECK(calls[whole] > 128);
}
