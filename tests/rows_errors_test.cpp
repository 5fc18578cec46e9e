#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/rows.hpp"
#include "src/core/system.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/fake_locker.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_tables.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;
namespace seam = pinflow::detail::system;

namespace {

constexpr std::uint64_t row_bytes = 24;
constexpr std::uint64_t row_count = 50;

/// A table of random rows, an exchange with it, and room for a batch.
struct exchanged {
    explicit exchanged(const device& device, row_route route = row_route::automatic,
                       std::uint64_t size_of_row = row_bytes)
        : row_size_bytes(size_of_row),
          content(random_bytes(row_count * row_size_bytes, random)),
          table(device, content, 1),
          rows(device, 40 * row_size_bytes, 2),
          rows_before(rows.content()),
          exchange(row_table(table.bytes(), row_size_bytes), device, {.route = route, .staging_bytes = 300}) {
    }

    bool nothing_moved() const {
        return table.holds(content) && table.sentinels_left() && rows.holds(rows_before) &&
               rows.sentinels_left();
    }
    /// Whether the exchange gathers and scatters as before.
    bool still_works() {
        const id_vector ids = make_ids(id_order::random, 40, row_count, random);
        exchange.gather(ids_of(ids), rows.data());
        const bool right = rows.holds(gathered(content, row_size_bytes, ids));
        exchange.scatter(ids_of(ids), rows.data());  // to where they came from
        return right && table.holds(content);
    }

    std::mt19937_64 random{40};
    std::uint64_t row_size_bytes;
    std::vector<std::byte> content;
    guarded_table table;
    guarded_rows rows;
    std::vector<std::byte> rows_before;
    row_exchange exchange;
};

/// Whether an exchange takes the rows of files from page-locked pages: these stay readable if a file is
/// truncated.
bool is_page_locked(const device& device, row_route route) {
    return device.kind() != device_kind::host && route != row_route::staged;
}

struct wrong_ids {
    id_vector ids;
    std::string message;  ///< the end of the error message: how many are wrong, and the first of them
};

std::vector<wrong_ids> every_wrong_list() {
    return {
        {{0, 1, row_count},
         "1 of 3 indices is outside the table, which has 50 rows: the first is 50, at position 2"},
        {{to_id(-1)},
         "1 of 1 indices is outside the table, which has 50 rows: the first is -1, at position 0"},
        {{49, to_id(-2), 3, 1000, 50, 49},
         "3 of 6 indices are outside the table, which has 50 rows: the first is -2, at position 1"},
        {{5, std::uint64_t{1} << 32, 5},
         "1 of 3 indices is outside the table, which has 50 rows: the first is 4294967296, at position 1"},
        {{7, std::uint64_t{1} << 63}, "the first is -9223372036854775808, at position 1"},
        {{7, (std::uint64_t{1} << 63) - 1}, "the first is 9223372036854775807, at position 1"},
    };
}

}  // namespace

TEST_CASE("row_table: refuses bytes that are not whole rows, or not whole elements") {
    std::vector<std::byte> memory(120);
    const auto refused = [&](std::size_t size_bytes, std::uint64_t row_size_bytes,
                             const dtype& element = dtype::of<std::byte>()) {
        return message_of<invalid_argument>(
            [&] { row_table(std::span(memory).first(size_bytes), row_size_bytes, element); });
    };
    CHECK(contains(refused(120, 0), "a table of 120 bytes cannot have rows of 0 bytes"));
    CHECK(contains(refused(120, 7), "a table of 120 bytes cannot have rows of 7 bytes"));
    CHECK(contains(refused(120, 121), "rows of 121 bytes"));
    CHECK(contains(refused(120, 6, dtype::of<float>()), "rows of 6 bytes cannot be made of elements of <f4"));
    CHECK(refused(120, 8, dtype::of<float>()).empty());
    CHECK(refused(0, 8).empty());

    const row_table table(memory, 12, dtype::of<float>());
    CHECK(table.row_count() == 10);
    CHECK(table.size_bytes() == 120);
    CHECK(table.data() == memory.data());
    CHECK(table.writable());
    CHECK(table.element().descr() == "<f4");
    CHECK(table.description() == "a table in memory");
    CHECK(table.source() == nullptr);
    CHECK(table.owner() == nullptr);
}

TEST_CASE("row_table: a table of a source keeps it alive, and is read-only") {
    std::shared_ptr<const row_source> source = numbered_rows(10, 3);
    const std::weak_ptr<const row_source> seen = source;
    auto table = std::make_unique<row_table>(std::move(source));
    CHECK_FALSE(seen.expired());
    CHECK(table->row_count() == 10);
    CHECK(table->row_size_bytes() == 24);
    CHECK(table->element().descr() == "<u8");
    CHECK_FALSE(table->writable());
    CHECK(table->description() == "an array in memory");
    table.reset();
    CHECK(seen.expired());

    const auto owner = std::make_shared<std::vector<std::byte>>(64);
    const std::weak_ptr<void> owned = owner;
    {
        const row_table of_owner(*owner, 8, dtype::of<std::byte>(), owner);
        CHECK(of_owner.owner() == owner);
        CHECK(owned.use_count() == 2);
    }
    CHECK(owned.use_count() == 1);
}

TEST_CASE("row_table: a source that is not mapped in one piece is refused, with the reason") {
    const temporary_folder folder;
    CHECK(contains(message_of<invalid_argument>([] { row_table(std::shared_ptr<const row_source>()); }),
                   "a null pointer to a source"));
    CHECK(contains(message_of<unsupported>([&] { row_table(std::make_shared<scripted_rows>(5)); }),
                   "cannot make a row_table of rows of a test: it is not mapped in one piece"));
    CHECK(contains(message_of<unsupported>(
                       [&] { row_table(concatenate({numbered_rows(5).rows(), numbered_rows(5).rows()})); }),
                   "not mapped in one piece"));
    std::string big_endian =
        format_npy_header(dtype::parse(">u8"), std::vector<std::uint64_t>{2, 1}) + std::string(16, 'x');
    write_bytes(folder / "big.npy", std::as_bytes(std::span(big_endian)));
    CHECK(contains(message_of<unsupported>([&] { row_table(open_npy(folder / "big.npy").rows()); }),
                   "is big-endian, so its rows are converted when they are read"));
    CHECK(contains(
        message_of<unsupported>([] { row_table(numbered_rows(5).sliding_windows(2, 1).rows()); }),
        "cannot make a row_table of an array in memory: its rows, of 64 bytes, begin every 32 bytes"));
}

// ---- wrong indices ------------------------------------------------------------------------------

TEST_CASE("rows: wrong indices in host memory are refused before the call returns, and nothing moves") {
    on_each_route([](const device& device, row_route route) {
        exchanged with(device, route);
        const stream stream(device);
        gate gate;
        hold(stream, gate);  // the calls do not wait for the stream
        for (const auto& [ids, message] : every_wrong_list()) {
            for (const id_place place : {id_place::host, id_place::host_signed}) {
                const id_list list(device, ids, place);
                std::string reason =
                    message_of<invalid_argument>([&] { with.exchange.gather(list.get(), with.rows.data()); });
                CHECK(reason.starts_with("cannot gather rows of a table in memory: "));
                CHECK(reason.ends_with(message));
                reason = message_of<invalid_argument>(
                    [&] { with.exchange.gather_async(list.get(), with.rows.data(), stream); });
                CHECK(reason.ends_with(message));
                reason = message_of<invalid_argument>(
                    [&] { with.exchange.scatter(list.get(), with.rows.data()); });
                CHECK(reason.starts_with("cannot scatter rows of a table in memory: "));
                CHECK(reason.ends_with(message));
                reason = message_of<invalid_argument>([&] {
                    with.exchange.scatter_async(list.get(), with.rows.data(), duplicate_policy::last, stream);
                });
                CHECK(reason.ends_with(message));
            }
        }
        gate.open();
        stream.synchronize();
        with.exchange.check();
        CHECK(with.nothing_moved());
        CHECK(with.still_works());
    });
}

TEST_CASE("rows: null pointers are refused before the call returns, unless nothing is asked for") {
    on_each_route([](const device& device, row_route route) {
        exchanged with(device, route);
        const stream stream(device);
        const id_vector ids{1, 2};
        CHECK(contains_all(message_of<invalid_argument>([&] { with.exchange.gather(ids_of(ids), nullptr); }),
                           {"2 rows of 24 bytes", "cannot be gathered", "null pointer"}));
        CHECK(contains_all(message_of<invalid_argument>([&] { with.exchange.scatter(ids_of(ids), nullptr); }),
                           {"2 rows of 24 bytes", "cannot be scattered", "null pointer"}));
        const std::vector<row_gather> group{{ids_of(ids), with.rows.data()}, {ids_of(ids), nullptr}};
        CHECK(contains(message_of<invalid_argument>([&] { with.exchange.gather_group_async(group, stream); }),
                       "cannot be gathered to a null pointer"));
        CHECK(contains_all(message_of<invalid_argument>([&] {
                               with.exchange.gather(row_ids::on_device(nullptr, 3), with.rows.data());
                           }),
                           {"3 indices", "null pointer"}));
        const id_vector none;
        with.exchange.gather(ids_of(none), nullptr);
        with.exchange.scatter(ids_of(none), nullptr);
        stream.synchronize();
        CHECK(with.nothing_moved());
        CHECK(with.still_works());
    });
}

TEST_CASE("rows: a wrong index in any batch stops all batches of a group") {
    on_each_route([](const device& device, row_route route) {
        exchanged with(device, route);
        const stream stream(device);
        const id_vector right{1, 2};
        const id_vector wrong{3, to_id(-5)};
        for (const std::size_t count : {2U, 64U, 65U, 200U}) {
            CAPTURE(count);
            std::vector<row_gather> gathers(count, {ids_of(right), with.rows.data()});
            std::vector<row_scatter> scatters(count, {ids_of(right), with.rows.data()});
            gathers.back().ids = scatters.back().ids = ids_of(wrong);
            const std::string message = "1 of " + std::to_string(2 * count) +
                                        " indices is outside the table, which has 50 rows: the first is -5, "
                                        "at position " +
                                        std::to_string(2 * count - 1);
            CHECK(message_of<invalid_argument>([&] {
                      with.exchange.gather_group_async(gathers, stream);
                  }).ends_with(message));
            CHECK(message_of<invalid_argument>([&] {
                      with.exchange.scatter_group_async(scatters, duplicate_policy::last, stream);
                  }).ends_with(message));
        }
        stream.synchronize();
        CHECK(with.nothing_moved());
        CHECK(with.still_works());
    });
}

TEST_CASE(
    "rows: wrong indices in device memory move nothing, and are reported once, by a check or the handle") {
    on_each_route([](const device& device, row_route route) {
        exchanged with(device, route);
        const stream stream(device);
        for (const auto& [ids, message] : every_wrong_list()) {
            const id_list list(device, ids, id_place::device);
            if (route == row_route::copy) {
                CHECK(contains(
                    message_of<unsupported>([&] { with.exchange.gather(list.get(), with.rows.data()); }),
                    "indices must be in host memory"));
                continue;
            }
            // gather and scatter wait for their call, and throw its error
            std::string reason =
                message_of<invalid_argument>([&] { with.exchange.gather(list.get(), with.rows.data()); });
            CHECK(reason.starts_with("rows of a table in memory were not gathered: "));
            CHECK(reason.ends_with(message));
            for (const auto policy : {duplicate_policy::last, duplicate_policy::error}) {
                reason = message_of<invalid_argument>(
                    [&] { with.exchange.scatter(list.get(), with.rows.data(), policy); });
                CHECK(reason.starts_with("rows of a table in memory were not scattered: "));
                CHECK(reason.ends_with(message));
            }
            with.exchange.check();
            CHECK(with.nothing_moved());

            with.exchange.gather_async(list.get(), with.rows.data(), stream);
            stream.synchronize();
            CHECK(message_of<invalid_argument>([&] { with.exchange.check(); }).ends_with(message));
            with.exchange.check();
            const exchange_call call =
                with.exchange.scatter_async(list.get(), with.rows.data(), duplicate_policy::last, stream);
            stream.synchronize();
            CHECK(message_of<invalid_argument>([&] { call.check(); }).ends_with(message));
            with.exchange.check();
            CHECK(with.nothing_moved());
        }
        CHECK(with.still_works());
    });
}

TEST_CASE("rows: the position of a wrong index in device memory is counted over all batches of its call") {
    on_each_device([](const device& device) {
        // on a requested direct route, gathers of rows of 4096 bytes or more are not sorted
        for (const auto& [route, size_bytes] : {std::pair(row_route::direct, row_bytes),
                                                {row_route::direct, std::uint64_t{4096}},
                                                {row_route::staged, row_bytes},
                                                {row_route::hybrid, row_bytes}}) {
            exchanged with(device, route, size_bytes);
            const stream stream(device);
            const id_vector on_host{1, 2, 3};
            const id_list good(device, {4, 5}, id_place::device);
            const id_list bad(device, {6, 77, 7, 88}, id_place::device);
            const std::vector<row_gather> batches{{ids_of(on_host), with.rows.data()},
                                                  {good.get(), with.rows.data() + 3 * size_bytes},
                                                  {row_ids::on_device(nullptr, 0), nullptr},
                                                  {bad.get(), with.rows.data() + 5 * size_bytes}};
            with.exchange.gather_group_async(batches, stream);
            stream.synchronize();
            CHECK(message_of<invalid_argument>([&] { with.exchange.check(); })
                      .ends_with("2 of 9 indices are outside the table, which has 50 rows: the first is 77, "
                                 "at position 6"));
            CHECK(with.nothing_moved());
            CHECK(with.still_works());
        }
    });
}

TEST_CASE("rows: in a group with host and device indices, wrong host indices are refused at once") {
    on_each_device([](const device& device) {
        exchanged with(device);
        const id_list on_device(device, {1, 99'999}, id_place::device);
        const id_vector on_host{2, 77'777};
        const std::vector<row_gather> batches{{on_device.get(), with.rows.data()},
                                              {ids_of(on_host), with.rows.data() + 2 * row_bytes}};
        const stream stream(device);
        const std::string reason =
            message_of<invalid_argument>([&] { with.exchange.gather_group_async(batches, stream); });
        CHECK(contains_all(reason, {"rows of a table in memory: 1 of 2 indices in host memory is outside",
                                    "the first is 77777, at position 3 of the group",
                                    "2 indices in device memory not checked"}));
        stream.synchronize();
        CHECK(with.nothing_moved());
        CHECK(with.still_works());
    });
}

TEST_CASE("rows: a failed call is reported even if an earlier call has not begun" * blocks_a_stream) {
    on_each_device([](const device& device) {
        exchanged with(device, row_route::direct);
        const stream stuck(device);
        const stream free(device);
        gate gate;
        hold(stuck, gate);
        const guarded_rows other(device, 2 * row_bytes);
        const id_list right(device, {1, 2}, id_place::device);
        const id_list wrong(device, {1, 99}, id_place::device);
        with.exchange.gather_async(right.get(), other.data(), stuck);
        CHECK(contains(
            message_of<invalid_argument>([&] { with.exchange.gather(wrong.get(), with.rows.data()); }),
            "the first is 99"));
        with.exchange.gather_async(wrong.get(), with.rows.data(), free);
        free.synchronize();
        CHECK(contains(message_of<invalid_argument>([&] { with.exchange.check(); }), "the first is 99"));
        with.exchange.check();
        gate.open();
        stuck.synchronize();
        CHECK(other.holds(gathered(with.content, row_bytes, {1, 2})));
        CHECK(with.nothing_moved());
    });
}

TEST_CASE("rows: each of several failed calls is reported, the oldest first" * blocks_a_stream) {
    on_each_device([](const device& device) {
        exchanged with(device);
        const stream stream(device);
        gate gate;
        hold(stream, gate);
        std::vector<id_list> lists;
        for (std::uint64_t i = 0; i < 5; ++i)
            lists.emplace_back(device, id_vector{i, 100 + i}, id_place::device);
        for (const id_list& list : lists)
            with.exchange.gather_async(list.get(), with.rows.data(), stream);
        with.exchange.check();
        gate.open();
        stream.synchronize();
        for (std::uint64_t i = 0; i < 5; ++i) {
            CHECK(contains(message_of<invalid_argument>([&] { with.exchange.check(); }),
                           "the first is " + std::to_string(100 + i)));
        }
        with.exchange.check();
        CHECK(with.nothing_moved());
    });
}

// ---- what cannot be done ------------------------------------------------------------------------

TEST_CASE("rows: impossible calls are refused with a message, and nothing moves") {
    on_each_route([](const device& device, row_route route) {
        exchanged with(device, route);
        const stream stream(device);
        const id_vector ids{1};
        std::vector<row_scatter> many(65, {ids_of(ids), with.rows.data()});
        for (const auto policy : {duplicate_policy::sum, duplicate_policy::error}) {
            CHECK(contains(
                message_of<unsupported>([&] { with.exchange.scatter_group_async(many, policy, stream); }),
                "65 batches make 2 calls, which a scatter allows only with duplicate_policy::last"));
        }
        const auto too_many = row_ids::on_device(with.rows.data(), std::uint64_t{1} << 32);
        CHECK_THROWS_AS(with.exchange.gather(too_many, with.rows.data()), invalid_argument);
        const auto most = row_ids::on_device(with.rows.data(), std::uint64_t{1} << 63);
        const std::vector<row_gather> overflowing(2, {most, with.rows.data()});
        CHECK(contains(
            message_of<invalid_argument>([&] { with.exchange.gather_group_async(overflowing, stream); }),
            "max_batch_rows"));
        if (device.kind() != device_kind::host) {
            CHECK(contains(message_of<invalid_argument>([&] {
                               with.exchange.gather_async(ids_of(ids), with.rows.data(),
                                                          pinflow::stream(device::host()));
                           }),
                           " on a stream of host"));
        }
        CHECK(with.nothing_moved());
        CHECK(with.still_works());

        const array rows = numbered_rows(10, 3);
        row_exchange reading(row_table(rows.rows()), device, {.route = route});
        CHECK(
            contains(message_of<unsupported>([&] { reading.scatter(ids_of(ids), with.rows.data()); }),
                     "cannot scatter rows to an array in memory: a row_table of a row_source is read-only"));
        CHECK(rows.view().as<std::uint64_t>()[3] == 1);
    });
}

// ---- files that change --------------------------------------------------------------------------

TEST_CASE("rows: a file that changed under its table is reported by the next call, and by a check") {
    on_each_route([](const device& device, row_route route) {
        const temporary_folder folder;
        const guarded_rows rows(device, 2 * 40);
        const id_vector ids{99, 0};
        const auto changes = [&](auto change, const std::string& expected) {
            write_random_rows(folder / "rows.npy", 100, 5, 41);
            row_exchange exchange(row_table(open_npy(folder / "rows.npy").rows()), device, {.route = route});
            exchange.gather(ids_of(ids), rows.data());
            exchange.check();
            const auto before = rows.content();
            change(folder / "rows.npy");
            CHECK(contains(message_of<data_changed>([&] { exchange.check(); }), expected));
            CHECK(contains(message_of<data_changed>([&] { exchange.gather(ids_of(ids), rows.data()); }),
                           expected));
            CHECK(rows.holds(before));
        };
        changes([](const auto& path) { std::filesystem::resize_file(path, 1000); }, "and has 1000 now");
        changes(
            [](const auto& path) {
                std::filesystem::rename(path, path.string() + ".old");
                write_bytes(path, pattern_bytes(4128));
            },
            "another file has taken its place");
        changes(
            [](const auto& path) {
                std::filesystem::last_write_time(path,
                                                 std::filesystem::file_time_type(std::chrono::seconds(1)));
            },
            "it was modified");
    });
}

TEST_CASE("rows: a file that is truncated before its rows are gathered is an error and not a signal" *
          blocks_a_stream) {
    on_each_route([](const device& device, row_route route) {
        // the CPU reads rows on the host device and on the staged route, which `automatic` takes
        const bool reads =
            device.kind() == device_kind::host || route == row_route::staged || route == row_route::automatic;
        if (!is_page_locked(device, route) && !reads) return;
        const temporary_folder folder;
        write_random_rows(folder / "rows.npy", 4096, 4, 42);
        row_exchange exchange(row_table(open_npy(folder / "rows.npy").rows()), device,
                              {.route = route, .staging_bytes = 4096});
        for (const id_place place : every_id_place) {
            if (route == row_route::copy && place == id_place::device) continue;
            id_vector ids(2000, 4095);
            ids[0] = 0;
            const id_list list(device, ids, place);
            const guarded_rows rows(device, ids.size() * 32);
            const stream stream(device);
            gate gate;
            hold(stream, gate);
            exchange.gather_async(list.get(), rows.data(), stream);
            std::filesystem::resize_file(folder / "rows.npy", 5000);
            gate.open();
            stream.synchronize();
            // one error for the reads, whatever the number of pieces, and then one for the file
            CHECK_THROWS_AS(exchange.check(), data_changed);
            CHECK(contains(message_of<data_changed>([&] { exchange.check(); }), "and has 5000 now"));
            CHECK(rows.sentinels_left());
            write_random_rows(folder / "rows.npy", 4096, 4, 42);
            exchange = row_exchange(row_table(open_npy(folder / "rows.npy").rows()), device,
                                    {.route = route, .staging_bytes = 4096});
        }
    });
}

TEST_CASE("rows: a disk that fails is reported once for each call, and later calls work") {
    const temporary_folder folder;
    write_random_rows(folder / "rows.npy", 1000, 4, 43);
    const array file = open_npy(folder / "rows.npy");
    const std::span content(file.view().data(), file.size_bytes());
    const auto fails_once = [&](const device& device, row_route route) {
        row_exchange exchange(row_table(file.rows()), device, {.route = route, .staging_bytes = 1000});
        const guarded_rows rows(device, 500 * 32);
        std::mt19937_64 random(43);
        const id_vector ids = make_ids(id_order::random, 500, 1000, random);
        const stream stream(device);
        {
            const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
                return what == seam::call::pread ? seam::injected_failure{.error = EIO}
                                                 : seam::injected_failure{};
            });
            CHECK_THROWS_AS(exchange.gather(ids_of(ids), rows.data()), system_failure);
            exchange.check();
            exchange.gather_async(ids_of(ids), rows.data(), stream);
            stream.synchronize();
        }
        CHECK_THROWS_AS(exchange.check(), system_failure);
        exchange.check();
        exchange.gather(ids_of(ids), rows.data());
        CHECK(rows.holds(gathered(content, 32, ids)));
    };
    on_each_device([&](const device& device) { fails_once(device, row_route::staged); });
    fails_once(device::host(), row_route::automatic);
}

namespace {

/// A device that page-locks. It counts direct gathers instead of running them: on locked pages they would
/// succeed whatever happens to the file.
class locking_backend final : public fake_cuda_backend {
 public:
    detail::fake_locker lock;
    std::atomic<unsigned> direct_gathers = 0;

    detail::page_locker* locker() override { return &lock; }
    void gather_rows(const detail::row_transfer& transfer, void* stream) override {
        if (transfer.compact) return fake_cuda_backend::gather_rows(transfer, stream);
        ++direct_gathers;
    }
};

}  // namespace

// Must be the last test case of this file: the fault guard cannot be uninstalled.
TEST_CASE("rows: a file that is truncated on the host device, or after its pages were locked, is no signal" *
          blocks_a_stream) {
    for (const bool guarded : {false, true}) {
        CAPTURE(guarded);
        if (guarded) install_fault_guard();
        {
            const temporary_folder folder;
            write_random_rows(folder / "rows.npy", 4096, 4, 42);
            row_exchange exchange(row_table(open_npy(folder / "rows.npy").rows()), device::host());
            CHECK(exchange.plan_gather(2000).route == row_route::direct);
            const id_vector ids(2000, 4095);
            const guarded_rows rows(device::host(), ids.size() * 32);
            const stream stream(device::host());
            gate gate;
            hold(stream, gate);
            const exchange_call call = exchange.gather_async(ids_of(ids), rows.data(), stream);
            std::filesystem::resize_file(folder / "rows.npy", 5000);
            gate.open();
            stream.synchronize();
            CHECK_THROWS_AS(call.check(), data_changed);
            CHECK_THROWS_AS(exchange.gather(ids_of(ids), rows.data()), data_changed);
            CHECK(rows.sentinels_left());
        }
        for (const row_route route : {row_route::copy, row_route::hybrid}) {
            CAPTURE(to_string(route));
            const temporary_folder folder;
            write_random_rows(folder / "rows.npy", 4096, 4, 42);
            locking_backend backend;
            row_exchange exchange(row_table(open_npy(folder / "rows.npy").rows()), backend.device(),
                                  {.route = route, .staging_bytes = 4096});
            CHECK(backend.lock.call_count() > 0);
            const id_vector ids(2000, 4095);
            const guarded_rows rows(device::host(), ids.size() * 32);
            const stream stream(backend.device());
            gate gate;
            hold(stream, gate);
            exchange.gather_async(ids_of(ids), rows.data(), stream);
            std::filesystem::resize_file(folder / "rows.npy", 5000);
            gate.open();
            stream.synchronize();
            CHECK_THROWS_AS(exchange.check(), data_changed);
            // the copy route becomes direct, because CUDA may copy short rows with the CPU
            CHECK(exchange.plan_gather(2000).route ==
                  (route == row_route::copy ? row_route::direct : row_route::hybrid));
            CHECK(backend.direct_gathers > 0);
        }
    }
}
