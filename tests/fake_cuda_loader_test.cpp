#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "src/core/side_by_side_mapping.hpp"
#include "tests/locking_backend.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"

// Loaders for a device that page-locks: which transfer brings which rows.

using namespace pinflow;

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
        wait_until_pinning_ended(batches);
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
                wait_until_pinning_ended(batches);
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

TEST_CASE("fake CUDA loader: rows whose pages cannot be registered do not wait for other pages") {
    const temporary_folder folder;
    const array rows = numbered_rows(320, words_of_64k);
    const std::uint64_t row_bytes = 8 * words_of_64k;
    const array_view rest(rows.view().data() + 256 * row_bytes, rows.dtype(), {64, words_of_64k});
    write_npy(folder / "rest.npy", rest);
    const auto both = concatenate({numbered_rows(256, words_of_64k), open_npy(folder / "rest.npy")});
    locking_backend backend;
    backend.lock.permits = 1;
    backend.lock.refuse = [](auto, bool is_read_only) { return !is_read_only; };
    loader_options options = options_for(backend, order::sequential);
    options.threads = 1;
    loader batches({both}, options);
    // the others are registered once the first batch has come
    CHECK(take_all(batches, [&](std::uint64_t) { backend.lock.allow(1000); }) == 4 * 320);
    const std::string reason = batches.report().arrays[0].reason;
    CAPTURE(reason);
    CHECK(reason.ends_with("; 64.0 MiB staged"));
}

TEST_CASE("fake CUDA loader: if most rows are not mapped, the report names the fallback") {
    const temporary_folder folder;
    const detail::scoped_mapping_limit limit(2);
    const array rows = numbered_rows(40, words_of_64k);
    std::vector<std::shared_ptr<const row_source>> files;
    for (std::uint64_t row = 0; row < 40; row += 4) {
        const std::string path = folder / (std::to_string(row) + ".npy");
        write_npy(path, {rows.view().data() + row * 8 * words_of_64k, rows.dtype(), {4, words_of_64k}});
        files.push_back(open_npy(path));
    }
    locking_backend backend;
    loader batches({concatenate(files)}, options_for(backend));
    CHECK(take_all(batches) == 160);
    wait_until_pinning_ended(batches);
    const loader_report report = batches.report();
    CAPTURE(report.reason);
    CHECK(report.pinned_bytes > 0);
    CHECK(report.route == route::staged);
    CHECK(report.arrays[0].transfer == "staged");
}

TEST_CASE("fake CUDA loader: rows of no bytes that are not mapped are resumed by a requested route") {
    const temporary_folder folder;
    write_npy(folder / "empty.npy", array_view(nullptr, dtype::parse(">f4"), {100, 0}));
    for (const route asked : {route::direct, route::copy}) {
        locking_backend backend;
        loader_options options = options_for(backend, order::sequential);
        options.route = asked;
        options.epochs = 1;
        {
            loader batches({open_npy(folder / "empty.npy")}, options);
            options.resume_from = batches.next()->state();
        }
        loader rest({open_npy(folder / "empty.npy")}, options);
        CHECK(take_all(rest) == 84);
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
                    wait_until_pinning_ended(batches);
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
        wait_until_pinning_ended(batches);
        CHECK(take_all(batches) == 4 * next);
        CHECK(batches.report().arrays[0].transfer == (order == order::sequential ? "copy engine" : "kernel"));
        CHECK(backend.lock.call_count() == 1);  // one range of addresses
    }
}

TEST_CASE("fake CUDA loader: sliding windows and rows with gaps are taken from the pages of the file") {
    const temporary_folder folder;
    constexpr std::uint64_t count = 1 << 20;
    std::vector<std::uint64_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), std::uint64_t{0});
    write_npy(folder / "numbers.npy", array_of(numbers, {count}).view());
    const array file = open_npy(folder / "numbers.npy");
    struct expectation {
        std::uint64_t length, step;
        const char* transfer;
        bool is_aligned;
    };
    for (const expectation& each :
         {expectation{65, 16, "kernel", false}, expectation{64, 100, "kernel", true},
          expectation{64, 33, "kernel", false}, expectation{8192, 1024, "copy engine", true}}) {
        CAPTURE(each.length);
        const array windows = file.sliding_windows(each.length, each.step);
        for (const order order : {order::sequential, order::shuffled}) {
            for (const bool registers : {true, false}) {
                locking_backend backend;
                if (!registers) backend.lock.refuse = [](auto, bool) { return true; };
                loader_options options = options_for(backend, order);
                options.epochs = each.length > 1000 ? 1 : 8;
                options.threads = 4;
                options.pin_budget_bytes = std::uint64_t{1} << 30;
                loader batches({windows}, options);
                wait_until_pinning_ended(batches);
                const stream stream(batches.device());
                std::uint64_t rows = 0;
                while (const auto batch = batches.next(stream)) {
                    const auto words = elements_of<std::uint64_t>(*batch, 0, stream);
                    bool right = words.size() == batch->row_count() * each.length;
                    for (std::size_t i = 0; i < words.size(); ++i)
                        right = right &&
                                words[i] == batch->row_ids()[i / each.length] * each.step + i % each.length;
                    CHECK(right);
                    rows += batch->row_count();
                }
                CHECK(rows == windows.shape()[0] * options.epochs);
                const loader_report report = batches.report();
                if (registers) {
                    CHECK(report.arrays[0].transfer == each.transfer);
                    CHECK(backend.unaligned_gathers == (each.is_aligned ? 0 : backend.gathers.load()));
                    CHECK(report.pinned_bytes >= file.size_bytes() - each.step * 8);
                    CHECK(report.pinned_bytes <= file.size_bytes() + 8192);
                } else {
                    CHECK(report.arrays[0].transfer == "staged");
                    CHECK(backend.bytes_copied_from({file.view().data(), file.view().size_bytes()}) == 0);
                }
            }
        }
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
