#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/device/pin_registry.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/fake_locker.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

// Loaders for a device that page-locks, which is the host under another name. They use every transfer of a
// GPU, and need no GPU.

using namespace pinflow;

namespace {

/// Counts the loader's requests to its device.
class locking_backend final : public fake_cuda_backend {
 public:
    detail::fake_locker lock;
    std::atomic<unsigned> gathers = 0;
    std::atomic<unsigned> unaligned_gathers = 0;
    std::atomic<unsigned> sorts = 0;
    std::atomic<unsigned> held_gathers = 0;
    std::atomic<std::uint64_t> copies = 0;
    /// Called before each call that makes copies to the device, with their number and stream. May throw.
    std::function<void(std::size_t, void*)> before_copies;

    detail::page_locker* locker() override { return &lock; }
    void gather_rows(const detail::row_transfer& transfer, void* stream) override {
        ++gathers;
        if (!is_aligned(transfer)) ++unaligned_gathers;
        fake_cuda_backend::gather_rows(transfer, stream);
    }
    void sort_rows(const detail::row_sort& sort, void* stream) override {
        ++sorts;
        fake_cuda_backend::sort_rows(sort, stream);
    }
    void gather_held(const detail::held_gather& gather, void* stream) override {
        ++held_gathers;
        fake_cuda_backend::gather_held(gather, stream);
    }
    void copy_batch_to_device(std::span<const copy_range> ranges, void* stream) override {
        if (before_copies) before_copies(ranges.size(), stream);
        copies += ranges.size();
        note_copies(ranges);
        fake_cuda_backend::copy_batch_to_device(ranges, stream);
    }
    void copy_to_device(std::byte* destination, std::span<const std::byte> source, void* stream) override {
        if (before_copies) before_copies(1, stream);
        const copy_range range{destination, source.data(), source.size()};
        note_copies({&range, 1});
        fake_cuda_backend::copy_to_device(destination, source, stream);
    }

    /// The size of the smallest copy from these pages; nothing if there was none. Must not be
    /// called while copies are enqueued.
    std::optional<std::size_t> min_copy_of(std::span<const std::byte> pages) const {
        std::optional<std::size_t> min_bytes;
        for (const std::span<const std::byte> each : copied_) {
            if (is_in(pages, each)) min_bytes = std::min(min_bytes.value_or(each.size()), each.size());
        }
        return min_bytes;
    }
    /// The bytes that were copied from these pages. Must not be called while copies are enqueued.
    std::uint64_t bytes_copied_from(std::span<const std::byte> pages) const {
        std::uint64_t bytes = 0;
        for (const std::span<const std::byte> each : copied_)
            bytes += is_in(pages, each) ? each.size() : 0;
        return bytes;
    }

 private:
    static bool is_in(std::span<const std::byte> pages, std::span<const std::byte> copy) {
        return copy.data() >= pages.data() && copy.data() < pages.data() + pages.size();
    }
    /// Notes the copies, cut as the CUDA backend cuts them.
    void note_copies(std::span<const copy_range> ranges) {
        std::vector<copy_range> pieces;
        detail::pin_registry::process().cut(ranges, pieces);
        const std::lock_guard guard(mutex_);
        for (const copy_range& piece : pieces)
            copied_.emplace_back(piece.source, piece.size_bytes);
    }

    std::mutex mutex_;
    std::vector<std::span<const std::byte>> copied_;
};

/// Files of numbered rows: each word of a row is the row's number.
struct numbered_file {
    numbered_file(const temporary_folder& folder, const std::string& name, std::uint64_t rows,
                  std::uint64_t width)
        : path(folder / name) {
        write_npy(path, numbered_rows(rows, width).view());
    }
    array open() const { return open_npy(path); }
    std::filesystem::path path;
};

/// Takes all batches, each of which must hold its rows in every array of 64-bit words.
/// @return how many rows came.
std::uint64_t take_all(loader& batches, const std::function<void(std::uint64_t)>& after_batch = {}) {
    const stream stream(batches.device());
    std::uint64_t rows = 0;
    std::uint64_t number = 0;
    while (const auto batch = batches.next(stream)) {
        for (std::size_t a = 0; a < batch->array_count(); ++a) {
            const auto words = elements_of<std::uint64_t>(*batch, a, stream);
            const std::size_t width = words.size() / batch->row_count();
            bool right = true;
            for (std::size_t i = 0; i < words.size(); ++i)
                right = right && words[i] == batch->row_ids()[i / width];
            CHECK(right);
        }
        rows += batch->row_count();
        if (after_batch) after_batch(number++);
    }
    return rows;
}

constexpr std::uint64_t words_of_64k = 8192;

loader_options options_for(locking_backend& backend, order order = order::shuffled) {
    return {.device = backend.device(), .batch_rows = 16, .order = order, .epochs = 4};
}

void wait_until_registered(const loader& batches) {
    while (batches.report().pin_time.count() == 0)
        std::this_thread::yield();
}

}  // namespace

TEST_CASE(
    "fake CUDA loader: large rows are copied from registered pages, and small arrays of files are held") {
    const temporary_folder folder;
    const numbered_file large(folder, "large.npy", 300, words_of_64k);
    const numbered_file label(folder, "label.npy", 300, 1);
    const numbered_file mask(folder, "mask.npy", 300, 5);
    for (const order order : {order::sequential, order::shuffled, order::windowed}) {
        locking_backend backend;
        loader batches({large.open(), label.open(), mask.open()}, options_for(backend, order));
        CHECK(take_all(batches) == 1200);
        const loader_report report = batches.report();
        REQUIRE(report.arrays.size() == 3);
        CHECK(report.arrays[0].transfer == "copy engine");
        CHECK(report.arrays[0].name.find("large.npy") != std::string::npos);
        CHECK(report.arrays[0].bytes == 1200 * words_of_64k * 8);
        CHECK(report.arrays[1].transfer == "held");
        CHECK(report.arrays[2].transfer == "held");
        CHECK(report.route == route::copy);
        CHECK(report.reason == report.arrays[0].reason);
        CHECK(backend.held_gathers > 0);
        CHECK(backend.gathers == 0);
    }
}

TEST_CASE(
    "fake CUDA loader: small rows are gathered by a kernel, of any alignment, several batches at a time") {
    const temporary_folder folder;
    for (const std::uint64_t width : {10U, 384U}) {  // 80 bytes and 3 KiB
        const numbered_file rows(folder, "rows.npy", 5000, width);
        locking_backend backend;
        loader batches({rows.open()}, options_for(backend));
        wait_until_registered(batches);
        CHECK(take_all(batches) == 20000);
        CHECK(batches.report().arrays[0].transfer == "kernel");
        CHECK(batches.report().route == route::direct);
        CHECK(backend.gathers > 0);
        CHECK(backend.unaligned_gathers == 0);
        CHECK(backend.gathers * 4 < batches.report().batches);
    }
    const numbered_file odd(folder, "odd.npy", 5000, 11);  // rows of 88 bytes
    locking_backend backend;
    loader batches({odd.open()}, options_for(backend));
    CHECK(take_all(batches) == 20000);
    CHECK(backend.unaligned_gathers == backend.gathers);
}

TEST_CASE(
    "fake CUDA loader: small rows of files are staged if the copy engine is requested, beside held arrays") {
    const temporary_folder folder;
    for (const std::uint64_t width : {1U, 100U, 1536U}) {
        const numbered_file rows(folder, "rows.npy", 5000, width);
        const numbered_file label(folder, "label.npy", 5000, 1);
        locking_backend backend;
        loader_options options = options_for(backend);
        options.batch_rows = 256;
        options.route = route::copy;
        const array opened = rows.open();
        loader batches({opened, label.open()}, options);
        CHECK(take_all(batches) == 20000);
        const loader_report report = batches.report();
        CHECK(report.arrays[0].transfer == "copy engine");
        CHECK(report.arrays[0].reason.find("staged") != std::string::npos);
        CHECK(report.arrays[1].transfer == "held");
        CHECK_FALSE(backend.min_copy_of({opened.view().data(), opened.view().size_bytes()}));
    }
}

TEST_CASE(
    "fake CUDA loader: rows of pages that are not registered are staged, or read by many threads, in any "
    "mixture") {
    const temporary_folder folder;
    // 16 pieces of 1 MiB, as the budget is so small
    const numbered_file large(folder, "large.npy", 256, words_of_64k);
    const numbered_file small(folder, "small.npy", 8192, 256);
    for (const numbered_file* const file : {&large, &small}) {
        for (const std::size_t pieces : {0U, 1U, 7U, 15U, 1000U}) {
            for (const unsigned threads : {4U, 16U}) {
                CAPTURE(pieces);
                CAPTURE(threads);
                locking_backend backend;
                backend.lock.refuse = [&, seen = std::size_t{0}](auto, bool) mutable {
                    return seen++ >= pieces;
                };
                loader_options options = options_for(backend);
                options.pin_budget_bytes = std::uint64_t{16} << 20;
                options.threads = threads;
                loader batches({file->open()}, options);
                wait_until_registered(batches);
                CHECK(take_all(batches) == 4 * file->open().shape()[0]);
                const loader_report report = batches.report();
                const bool has_most = pieces > 8;
                // many threads read rows that are meant for the copy engine
                const bool reads = threads == 16 && file == &large;
                const std::string others = reads ? "read" : "staged";
                CHECK((report.route == (reads ? route::read : route::staged)) == !has_most);
                CHECK((report.arrays[0].transfer == others) == !has_most);
                CHECK((report.pinned_bytes > 0) == (pieces > 0));
                // a loader begins to fill while it registers, and may stage some rows that are registered
                // later
                if (pieces < 1000) CHECK(report.arrays[0].reason.find(others) != std::string::npos);
            }
        }
    }
}

TEST_CASE("fake CUDA loader: pages are registered while batches are delivered") {
    const temporary_folder folder;
    const numbered_file large(folder, "large.npy", 256, words_of_64k);
    const numbered_file small(folder, "small.npy", 8192, 256);
    // 16 large rows pass through shared staging buffers, fewer through those of the slots
    const std::vector<std::pair<const numbered_file*, std::uint64_t>> cases{
        {&large, 16}, {&large, 15}, {&small, 16}};
    for (const auto& [file, batch_rows] : cases) {
        for (const order order : {order::sequential, order::shuffled}) {
            locking_backend backend;
            backend.lock.permits = 0;
            loader_options options = options_for(backend, order);
            options.batch_rows = batch_rows;
            options.pin_budget_bytes = std::uint64_t{17} << 20;
            options.threads = 4;
            loader batches({file->open()}, options);
            CHECK(take_all(batches, [&](std::uint64_t) { backend.lock.allow(1); }) ==
                  4 * file->open().shape()[0]);
            CHECK(batches.report().pinned_bytes > 0);
            backend.lock.allow(1000);
        }
    }
}

TEST_CASE("fake CUDA loader: if a registration does not return, all rows come without registered pages") {
    const temporary_folder folder;
    const numbered_file large(folder, "large.npy", 64, words_of_64k);
    for (const unsigned threads : {1U, 2U, 8U}) {
        for (const order order : {order::sequential, order::shuffled}) {
            locking_backend backend;
            backend.lock.permits = 0;
            loader_options options = options_for(backend, order);
            options.threads = threads;
            options.epochs = 2;
            {
                loader batches({large.open()}, options);
                CHECK(take_all(batches) == 128);
                CHECK(batches.report().pinned_bytes == 0);
                const std::string reason = batches.report().arrays[0].reason;
                CAPTURE(reason);
                CHECK(contains_all(reason, {"0 bytes of 4.0 MiB are registered so far", "8.0 MiB staged"}));
                backend.lock.allow(1000);  // so that its end need not wait for the deadline
            }
        }
    }
}

TEST_CASE("fake CUDA loader: a requested route binds every array except held arrays") {
    const temporary_folder folder;
    const numbered_file large(folder, "large.npy", 100, words_of_64k);
    const numbered_file label(folder, "label.npy", 100, 1);
    for (const auto& [asked, transfer] : {std::pair(route::direct, "kernel"),
                                          {route::copy, "copy engine"},
                                          {route::staged, "staged"},
                                          {route::read, "read"}}) {
        CAPTURE(to_string(asked));
        locking_backend backend;
        loader_options options = options_for(backend);
        options.route = asked;
        loader batches({large.open(), label.open()}, options);
        CHECK(take_all(batches) == 400);
        const loader_report report = batches.report();
        CHECK(report.route == asked);
        CHECK(report.arrays[0].transfer == transfer);
        CHECK(report.arrays[1].transfer == "held");
    }
    locking_backend backend;
    backend.lock.refuse = [](auto, bool) { return true; };
    for (const route asked : {route::direct, route::copy}) {
        loader_options options = options_for(backend);
        options.route = asked;
        CHECK_THROWS_AS(loader({large.open()}, options), unsupported);
        // a file that has lost its pages is reported as changed
        const numbered_file changed(folder, "changed.npy", 100, words_of_64k);
        const array rows = changed.open();
        std::filesystem::resize_file(folder / "changed.npy", 0);
        CHECK_THROWS_AS(loader({rows}, options), data_changed);
    }
}

TEST_CASE("fake CUDA loader: the copy engine copies no piece below 32 KiB of a file's pages") {
    const temporary_folder folder;
    // CUDA copies those with the CPU: if the file was truncated, that ends the process
    constexpr std::size_t min_bytes = 32 * 1024;
    for (const std::uint64_t words : {384U, 1024U, 5000U, 12'800U}) {
        const numbered_file file(folder, std::to_string(words) + ".npy", 101, words);
        std::vector<std::uint64_t> more(30 * words);
        for (std::size_t i = 0; i < more.size(); ++i)
            more[i] = 101 + i / words;
        const array memory = array_of(more, {30, words});
        for (const order order : {order::sequential, order::shuffled}) {
            for (const route route : {route::automatic, route::copy}) {
                for (const bool beside_memory : {false, true}) {
                    CAPTURE(words);
                    CAPTURE(to_string(order));
                    CAPTURE(to_string(route));
                    CAPTURE(beside_memory);
                    const array rows = file.open();
                    std::shared_ptr<const row_source> source = rows.rows();
                    if (beside_memory) source = concatenate({source, memory.rows()});
                    locking_backend backend;
                    loader_options options = options_for(backend, order);
                    options.route = route;
                    // registered in pieces of 1 MiB, whose edges are within rows
                    if (route == route::automatic) options.pin_budget_bytes = std::uint64_t{16} << 20;
                    loader batches({source}, options);
                    wait_until_registered(batches);
                    CHECK(take_all(batches) == 4 * source->row_count());
                    const auto smallest = backend.min_copy_of({rows.view().data(), rows.view().size_bytes()});
                    if (smallest) CHECK(*smallest >= min_bytes);
                    if (words == 12'800 || (order == order::sequential && route == route::copy))
                        CHECK(smallest);
                }
            }
        }
    }
}

TEST_CASE(
    "fake CUDA loader: if a batch has too many short pieces at edges, the rest of their rows are staged") {
    const temporary_folder folder;
    constexpr std::uint64_t short_pieces_bytes = 32 << 10;
    constexpr std::uint64_t row_count = 160;
    // rows of 96,000 bytes, and pieces of 1 MiB: ten of fifteen edges cut off less than 32 KiB
    const numbered_file file(folder, "rows.npy", row_count, 12'000);
    const array rows = file.open();
    const std::span pages(rows.view().data(), rows.view().size_bytes());
    for (const std::uint64_t batch_rows : {std::uint64_t{8}, std::uint64_t{80}}) {
        CAPTURE(batch_rows);
        locking_backend backend;
        loader_options options = options_for(backend);
        options.batch_rows = batch_rows;
        options.route = route::copy;
        const pinned_pages registered(pin_ranges(rows.rows()), backend.device(),
                                      {.piece_bytes = std::uint64_t{1} << 20});
        REQUIRE(registered.wait());
        loader batches({rows}, options);
        CHECK(take_all(batches) == 4 * row_count);
        const auto smallest = backend.min_copy_of(pages);
        REQUIRE(smallest);
        CHECK(*smallest >= short_pieces_bytes);
        const std::uint64_t staged_bytes = 4 * pages.size() - backend.bytes_copied_from(pages);
        const std::uint64_t batch_count = 4 * row_count / batch_rows;
        // an average batch of 80 rows has five short pieces, about 75 KiB, one of 8 rows has half a piece
        CHECK((staged_bytes > batch_count * short_pieces_bytes) == (batch_rows == 80));
    }
}

TEST_CASE("fake CUDA loader: arrays in memory and rows of a custom source travel beside files") {
    const temporary_folder folder;
    const numbered_file large(folder, "large.npy", 200, words_of_64k);
    const auto custom = std::make_shared<scripted_rows>(200, 3);
    locking_backend backend;
    loader batches({large.open(), numbered_rows(200, 2), custom, numbered_rows(200, 400)},
                   options_for(backend));
    CHECK(take_all(batches) == 800);
    const loader_report report = batches.report();
    CHECK(report.arrays[1].transfer == "staged");  // 16 bytes a row, which the user may still write
    CHECK(report.arrays[2].transfer == "decode");
    CHECK(report.arrays[3].transfer == "kernel");
}

TEST_CASE("fake CUDA loader: rows of many files are gathered and copied across their edges") {
    const temporary_folder folder;
    std::vector<std::shared_ptr<const row_source>> files;
    std::uint64_t next = 0;
    for (std::uint64_t file = 0; file < 40; ++file) {
        const std::uint64_t rows = 1 + file * 7 % 31;
        std::vector<std::uint64_t> words(rows * 640);
        for (std::size_t i = 0; i < words.size(); ++i)
            words[i] = next + i / 640;
        next += rows;
        const auto path = folder / (std::to_string(file) + ".npy");
        write_npy(path, array_of(words, {rows, 640}).view());
        files.push_back(open_npy(path));
    }
    const auto all = concatenate(files);
    for (const order order : {order::sequential, order::shuffled}) {
        locking_backend backend;
        loader_options options = options_for(backend, order);
        options.batch_rows = 64;
        loader batches({all}, options);
        wait_until_registered(batches);
        CHECK(take_all(batches) == 4 * next);
        CHECK(batches.report().arrays[0].transfer == (order == order::sequential ? "copy engine" : "kernel"));
        CHECK(backend.lock.call_count() == 1);  // one range of addresses
    }
}

TEST_CASE("fake CUDA loader: with few batches left pages are not registered") {
    const temporary_folder folder;
    const numbered_file large(folder, "large.npy", 2000, words_of_64k);
    locking_backend backend;
    loader_options options = options_for(backend);
    options.max_batches = 2;
    options.threads = 4;  // 10 or more would read the rows with pread
    loader batches({large.open()}, options);
    CHECK(take_all(batches) == 32);
    CHECK(batches.report().arrays[0].transfer == "staged");
    CHECK(backend.lock.call_count() == 0);
}

TEST_CASE("fake CUDA loader: a stream that is being captured is refused, and no batch is lost") {
    const temporary_folder folder;
    const numbered_file large(folder, "large.npy", 200, words_of_64k);
    locking_backend backend;
    loader batches({large.open()}, options_for(backend));
    const stream captured(batches.device());
    const stream stream(batches.device());
    backend.captured = captured.view().native_handle();
    const std::string why = message_of<unsupported>([&] { batches.next(captured); });
    CHECK(contains(why, "CUDA graph"));
    std::optional<batch> first = batches.next(stream);
    REQUIRE(first);
    CHECK_THROWS_AS(first->used_on(captured), unsupported);
    first.reset();
    std::uint64_t count = 1;
    while (batches.next(stream))
        ++count;
    CHECK(count == 4 * 13);
}

TEST_CASE("fake CUDA loader: a file that changes is noticed before the next epoch ends, held or not") {
    const temporary_folder folder;
    const numbered_file large(folder, "large.npy", 200, words_of_64k);
    const numbered_file label(folder, "label.npy", 200, 1);
    for (const bool small : {true, false}) {
        CAPTURE(small);
        locking_backend backend;
        loader batches({large.open(), label.open()}, options_for(backend));
        const auto change = [&](std::uint64_t batch) {
            if (batch != 3) return;
            std::filesystem::last_write_time(
                small ? label.path : large.path,
                std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
        };
        const stream stream(batches.device());
        std::uint64_t count = 0;
        CHECK_THROWS_AS(
            [&] {
                while (batches.next(stream))
                    change(count++);
            }(),
            data_changed);
        CHECK(count < 2 * 13);
    }
}

TEST_CASE(
    "fake CUDA loader: two threads enqueue the 256 copies of a group if at most one group is being copied") {
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
    "fake CUDA loader: if one of two threads cannot enqueue its copies, next throws, and the loader ends") {
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

TEST_CASE("fake CUDA loader: rows that are read or staged are copied one staging buffer at a time") {
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

TEST_CASE("fake CUDA loader: rows whose pages are not registered yet pass through staging buffers") {
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

TEST_CASE("fake CUDA loader: shared staging buffers take the place of those in the slots") {
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
    "fake CUDA loader: if rows in a staging buffer cannot be copied, next throws, and the loader ends") {
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

TEST_CASE("fake CUDA loader: one thread enqueues the copies of a group while two groups are being copied") {
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
