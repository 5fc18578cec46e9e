#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/loader/loader.hpp"
#include "samples.hpp"
#include "sanitized.hpp"
#include "temporary_folder.hpp"

// Files that change while an epoch is under way, or before.
using namespace pinflow;

namespace {

constexpr std::uint64_t row_count = 200;
constexpr std::uint64_t batch_rows = 10;
constexpr std::uint64_t batch_count = row_count / batch_rows;

enum class change { emptied, cut_short, modified, replaced };
constexpr std::array every_change{change::emptied, change::cut_short, change::modified, change::replaced};

void make(change change, const std::filesystem::path& path) {
    switch (change) {
        case change::emptied:
            std::filesystem::resize_file(path, 0);
            break;
        case change::cut_short:
            std::filesystem::resize_file(path, std::filesystem::file_size(path) - 9);
            break;
        case change::modified: {
            std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
            file.seekp(-1, std::ios::end);
            file.put('x');
            break;
        }
        case change::replaced:
            std::filesystem::copy_file(path, path.string() + ".copy");
            std::filesystem::rename(path.string() + ".copy", path);
            break;
    }
}

/// Sets an old write time, so that a change is detected however coarse the filesystem's clock is.
void make_old(const std::filesystem::path& path) {
    std::filesystem::last_write_time(path,
                                     std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
}

/// Writes a new file of zeros, which takes no space. A mapping of the old file may still exist.
void write_anew(const std::filesystem::path& path, const dtype& type, const shape_vector& shape) {
    std::filesystem::remove(path);
    write_npy_bytes(path, type, shape, {});
    std::filesystem::resize_file(path,
                                 std::filesystem::file_size(path) + element_count(shape) * type.size_bytes());
    make_old(path);
}

/// Checks that a loader of two epochs of `sources` throws data_changed before it has begun the second, when
/// `disturb` is called after `taken` batches, and that nothing comes from then on.
template <typename Disturb>
void check_change_is_noticed(std::vector<std::shared_ptr<const row_source>> sources,
                             const loader_options& options, std::uint64_t taken, Disturb disturb) {
    loader loader(std::move(sources), options);
    const stream stream(options.device);
    for (std::uint64_t i = 0; i < taken; ++i)
        REQUIRE(loader.next(stream));
    disturb();
    std::uint64_t batches = taken;
    CHECK_THROWS_AS(
        [&] {
            while (const auto batch = loader.next(stream)) {
                ++batches;
                if (batch->epoch() > 0) break;
            }
        }(),
        data_changed);
    CHECK(batches <= batch_count);
    CHECK_FALSE(loader.next(stream).has_value());
    CHECK_FALSE(loader.next().has_value());
}

loader_options changing_options(const device& device, order order, route route) {
    loader_options options = options_for(device, order);
    options.batch_rows = batch_rows;
    options.epochs = 2;
    options.route = route;
    options.slots = 2;  // so that few batches are ready before the change
    return options;
}

struct changing_array {
    std::string name;
    dtype type;
    shape_vector shape;
};

/// Calls `body(options)` for the sequential and the shuffled order, and for all routes of each device that
/// this sample of files can take.
template <typename Body>
void for_every_route(const std::vector<std::shared_ptr<const row_source>>& sources, Body body) {
    known_sample sample;
    for (const auto& source : sources)
        sample.push_back({source, {}});
    on_each_device([&](const device& device) {
        for (const order order : {order::sequential, order::shuffled}) {
            for (const route route : routes_of(sample, device, order)) {
                INFO("route " << to_string(route) << ", order " << to_string(order));
                body(changing_options(device, order, route));
            }
        }
    });
}

}  // namespace

TEST_CASE("changed files: a change of one array of a sample is an error before the epoch has ended") {
    const temporary_folder folder;
    // rows too small for the copy engine, rows large enough for it, and labels small enough to be held
    const std::vector<std::vector<changing_array>> samples{
        {{"images.npy", dtype::of<std::uint8_t>(), {row_count, 3, 32, 32}},
         {"labels.npy", dtype::of<std::int64_t>(), {row_count}}},
        {{"images.npy", dtype::of<float>(), {row_count, 128, 128}},
         {"labels.npy", dtype::of<std::uint8_t>(), {row_count}}},
    };
    for (const auto& arrays : samples) {
        const auto open_all = [&] {
            std::vector<std::shared_ptr<const row_source>> sources;
            for (const changing_array& array : arrays)
                sources.push_back(open_npy(folder / array.name));
            return sources;
        };
        for (const changing_array& array : arrays)
            write_anew(folder / array.name, array.type, array.shape);
        for_every_route(open_all(), [&](const loader_options& options) {
            for (const changing_array& array : arrays) {
                for (const change change : every_change) {
                    for (const std::uint64_t taken : {std::uint64_t{1}, batch_count - 4}) {
                        if (sanitized && taken == 1 && change == change::modified) continue;
                        INFO(array.name << ", change " << static_cast<int>(change) << " after " << taken
                                        << " batches");
                        check_change_is_noticed(open_all(), options, taken,
                                                [&] { make(change, folder / array.name); });
                        write_anew(folder / array.name, array.type, array.shape);
                    }
                }
            }
        });
    }
}

TEST_CASE("changed files: a change of one file of many is an error before the epoch has ended") {
    const temporary_folder folder;
    constexpr std::uint64_t file_count = 20;
    const dtype type = dtype::of<float>();
    const auto path_of = [&](std::uint64_t number) {
        return folder / ("part-" + std::to_string(number) + ".npy");
    };
    for (const std::uint64_t width : {6U, 16'384U}) {
        CAPTURE(width);
        const shape_vector shape{row_count / file_count, width};
        for (std::uint64_t number = 0; number < file_count; ++number)
            write_anew(path_of(number), type, shape);
        const auto open_all = [&] { return std::vector{open_rows((folder / "part-*.npy").string())}; };
        for_every_route(open_all(), [&](const loader_options& options) {
            // in the order of the files: a delivered file, the next file, and the last file
            for (const std::uint64_t changed : {std::uint64_t{0}, file_count / 2, file_count - 1}) {
                for (const change change : every_change) {
                    INFO("file " << changed << ", change " << static_cast<int>(change));
                    check_change_is_noticed(open_all(), options, batch_count / 2,
                                            [&] { make(change, path_of(changed)); });
                    write_anew(path_of(changed), type, shape);
                }
            }
        });
    }
}

TEST_CASE("changed files: with several consumer threads, exactly one gets the error of a change") {
    const temporary_folder folder;
    const auto path = folder / "rows.npy";
    const dtype type = dtype::of<float>();
    const shape_vector shape{row_count, 768};
    write_anew(path, type, shape);
    for_every_route({open_npy(path)}, [&](const loader_options& options) {
        loader_options with_more_slots = options;
        with_more_slots.slots = 6;
        loader loader({open_npy(path)}, with_more_slots);
        REQUIRE(loader.next());
        make(change::replaced, path);
        std::atomic<int> errors = 0;
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; ++t) {
            threads.emplace_back([&] {
                const stream stream(options.device);
                try {
                    while (loader.next(stream)) {
                    }
                } catch (const data_changed&) {
                    ++errors;
                }
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        CHECK(errors == 1);
        CHECK_FALSE(loader.next().has_value());
        write_anew(path, type, shape);
    });
}

TEST_CASE("changed files: a file changed before its loader was made is an error before the second epoch") {
    const temporary_folder folder;
    const auto path = folder / "rows.npy";
    write_anew(path, dtype::of<float>(), {row_count, 768});
    for_every_route({open_npy(path)}, [&](const loader_options& options) {
        for (const change change : every_change) {
            INFO("change " << static_cast<int>(change));
            const std::vector<std::shared_ptr<const row_source>> sources{open_npy(path)};
            make(change, path);
            CHECK_THROWS_AS(
                [&] {
                    loader loader(sources, options);
                    const stream stream(options.device);
                    while (const auto batch = loader.next(stream))
                        REQUIRE(batch->epoch() == 0);
                }(),
                data_changed);
            write_anew(path, dtype::of<float>(), {row_count, 768});
        }
    });
}
