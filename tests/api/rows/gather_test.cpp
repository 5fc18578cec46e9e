#include "pinflow/rows.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/pin.hpp"
#include "row_tables.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

TEST_CASE(
    "rows: every route gathers rows of any size, number, order and alignment, and writes nothing else") {
    on_each_route([](const device& device, row_route route) {
        for_combinations(route, 1, [&](const row_combination& drawn, std::mt19937_64& random) {
            const auto content = random_bytes(drawn.row_count * drawn.row_bytes, random);
            const guarded_table table(device, content, drawn.table_misalignment);
            const id_vector ids = make_ids(drawn.order, drawn.count, drawn.row_count, random);
            const id_list list(device, ids, drawn.place);
            const guarded_rows rows(device, drawn.count * drawn.row_bytes, drawn.rows_misalignment);
            row_exchange exchange(row_table(table.bytes(), drawn.row_bytes), device, drawn.options);
            if (drawn.waits) {
                exchange.gather(list.get(), rows.data());
            } else {
                const stream stream(device);
                exchange.gather_async(list.get(), rows.data(), stream);
                stream.synchronize();
            }
            REQUIRE(rows.holds(gathered(content, drawn.row_bytes, ids)));
            CHECK(rows.sentinels_left());
            CHECK(table.holds(content));
            CHECK(table.sentinels_left());
            exchange.check();
        });
    });
}

TEST_CASE("rows: a group of batches is gathered like its single batches, including empty batches") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(2);
        for (const std::uint64_t row_bytes : {1U, 7U, 64U, 513U, 4096U}) {
            constexpr std::uint64_t row_count = 300;
            const auto content = random_bytes(row_count * row_bytes, random);
            const guarded_table table(device, content, one_of(every_misalignment, random));
            row_exchange exchange(row_table(table.bytes(), row_bytes), device,
                                  {.route = route, .staging_bytes = 32 << 10});
            for (const std::size_t batch_count : {0U, 1U, 3U, 64U, 65U}) {
                CAPTURE(batch_count);
                std::vector<id_vector> ids;
                std::vector<id_list> lists;
                std::vector<guarded_rows> destinations;
                std::vector<row_gather> batches;
                for (std::size_t i = 0; i < batch_count; ++i) {
                    const std::size_t count = random() % 3 == 0 ? 0 : random() % (batch_count > 3 ? 20 : 400);
                    auto place = one_of(every_id_place, random);
                    if (route == row_route::copy && place == id_place::device) place = id_place::host_signed;
                    ids.push_back(make_ids(one_of(every_id_order, random), count, row_count, random));
                    lists.emplace_back(device, ids.back(), place);
                    destinations.emplace_back(device, count * row_bytes, one_of(every_misalignment, random));
                    batches.push_back({lists.back().get(), destinations.back().data()});
                }
                const stream stream(device);
                exchange.gather_group_async(batches, stream);
                stream.synchronize();
                for (std::size_t i = 0; i < batch_count; ++i) {
                    REQUIRE(destinations[i].holds(gathered(content, row_bytes, ids[i])));
                    CHECK(destinations[i].sentinels_left());
                }
            }
        }
    });
}

TEST_CASE("rows: a repeated row is gathered to all of its positions, for any size and number of rows") {
    on_each_device([](const device& device) {
        std::mt19937_64 random(7);
        // many rows, few rows and short rows: the kernel that repeats rows divides its threads differently
        constexpr std::size_t many = sanitized ? 20'000 : 50'000;
        for (const auto& [row_bytes, row_count, count] :
             {std::tuple<std::uint64_t, std::uint64_t, std::size_t>{1, 200, many},
              {16, many, many},
              {60, many, many},
              {100, 2 * many, many},
              {256, many, many},
              {512, many, many},
              {513, many, many},
              {2048, 40, 3},
              {2048, 40, 64},
              {4092, 300, 1000},
              {std::uint64_t{16} << 10, 40, 64},  // rows of 4096 bytes or more are not sorted
              {4100, 300, 1000}}) {
            const auto content = random_bytes(row_count * row_bytes, random);
            const guarded_table table(device, content);
            row_exchange exchange(row_table(table.bytes(), row_bytes), device, {.route = row_route::direct});
            const guarded_rows rows(device, count * row_bytes);
            for (const id_order order : {id_order::random, id_order::all_equal, id_order::few}) {
                INFO(count << " rows of " << row_bytes << " bytes, order " << static_cast<int>(order));
                const id_vector ids = make_ids(order, count, row_count, random);
                exchange.gather(ids_of(ids), rows.data());
                REQUIRE(rows.holds(gathered(content, row_bytes, ids)));
                CHECK(rows.sentinels_left());
            }
        }
    });
}

TEST_CASE("rows: many rows pass through small staging buffers without overwriting each other") {
    on_each_device([](const device& device) {
        // The table has few rows, which stay in the CPU's caches, and nobody has touched the destination yet:
        // the CPU is far ahead of the copies.
        constexpr std::uint64_t row_bytes = 16 << 10;
        constexpr std::uint64_t row_count = 16;
        constexpr std::size_t count = sanitized ? 1000 : 4000;
        std::mt19937_64 random(3);
        const auto content = random_bytes(row_count * row_bytes, random);
        const guarded_table table(device, content);
        for (const row_route route : {row_route::staged, row_route::hybrid}) {
            for (const auto place : {id_place::host, id_place::device}) {
                row_exchange exchange(row_table(table.bytes(), row_bytes), device,
                                      {.route = route, .staging_bytes = 128 << 10});
                const stream stream(device);
                const device_buffer rows(count * row_bytes, stream);
                const id_vector ids = make_ids(id_order::random, count, row_count, random);
                const id_list list(device, ids, place);
                exchange.gather_async(list.get(), rows.data(), stream);
                CHECK(to_host(rows.data(), rows.size_bytes(), stream) == gathered(content, row_bytes, ids));
            }
        }
    });
}

TEST_CASE("rows: what an earlier call has left in memory is not delivered as a row") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(6);
        const auto content = random_bytes(std::size_t{100} * 8, random);
        const guarded_table table(device, content);
        for (const std::size_t count : {20U, 25U, 30U, 40U, 60U}) {
            row_exchange exchange(row_table(table.bytes(), 8), device, {.route = route, .staging_bytes = 64});
            const guarded_rows rows(device, count * 8);
            id_vector fewer(20);
            std::iota(fewer.begin(), fewer.end(), 0);
            exchange.gather(ids_of(fewer), rows.data());
            id_vector moved_by_one(count);
            std::iota(moved_by_one.begin() + 1, moved_by_one.end(), 0);
            exchange.gather(ids_of(moved_by_one), rows.data());
            CHECK(rows.holds(gathered(content, 8, moved_by_one)));
        }
    });
}

TEST_CASE("rows: every route gathers rows of a mapped file") {
    const temporary_folder folder;
    constexpr std::uint64_t row_count = 500;
    constexpr std::uint64_t width = 33;
    write_random_rows(folder / "rows.npy", row_count, width, 4);
    const array file = open_npy(folder / "rows.npy");
    const std::span content(file.view().data(), file.size_bytes());
    on_each_route([&](const device& device, row_route route) {
        std::mt19937_64 random(4);
        row_exchange exchange(row_table(file.rows()), device, {.route = route, .staging_bytes = 20'000});
        CHECK(exchange.table().row_count() == row_count);
        CHECK(exchange.table().row_size_bytes() == width * 8);
        CHECK_FALSE(exchange.table().writable());
        for (const id_order order : every_id_order) {
            for (const auto place : every_id_place) {
                if (route == row_route::copy && place == id_place::device) continue;
                const id_vector ids = make_ids(order, 700, row_count, random);
                const id_list list(device, ids, place);
                const guarded_rows rows(device, ids.size() * width * 8, 4);
                exchange.gather(list.get(), rows.data());
                CHECK(rows.holds(gathered(content, width * 8, ids)));
                CHECK(rows.sentinels_left());
            }
        }
    });
}

TEST_CASE("rows: the batches of a group are gathered from a mapped file, short rows and long ones") {
    const temporary_folder folder;
    constexpr std::uint64_t row_count = 60;
    for (const std::uint64_t width : {5U, 700U, 50'000U}) {  // the last: 400 KB
        CAPTURE(width);
        write_random_rows(folder / "rows.npy", row_count, width, 5);
        const array file = open_npy(folder / "rows.npy");
        const std::span content(file.view().data(), file.size_bytes());
        on_each_route([&](const device& device, row_route route) {
            std::mt19937_64 random(5);
            row_exchange exchange(row_table(file.rows()), device, {.route = route, .staging_bytes = 20'000});
            const stream stream(device);
            std::deque<guarded_rows> rows;
            std::vector<id_vector> ids;
            std::vector<row_gather> batches;
            for (const std::uint64_t count : {0U, 3U, 1U, 0U, 20U, 7U, 0U})
                ids.push_back(make_ids(id_order::random, count, row_count, random));
            for (const id_vector& each : ids) {
                rows.emplace_back(device, each.size() * width * 8);
                batches.push_back({ids_of(each), rows.back().data()});
            }
            const exchange_call call = exchange.gather_group_async(batches, stream);
            stream.synchronize();
            call.check();
            for (std::size_t i = 0; i < ids.size(); ++i) {
                CHECK(rows[i].holds(gathered(content, width * 8, ids[i])));
                CHECK(rows[i].sentinels_left());
            }
        });
    }
}

TEST_CASE("rows: with wrong indices in device memory, no rows of a mapped file are gathered") {
    const temporary_folder folder;
    write_random_rows(folder / "rows.npy", 60, 4, 6);
    const array file = open_npy(folder / "rows.npy");
    const std::span content(file.view().data(), file.size_bytes());
    on_each_route([&](const device& device, row_route route) {
        if (route == row_route::copy) return;
        for (const unsigned blocks : {0U, 2U}) {
            row_exchange exchange(row_table(file.rows()), device, {.route = route, .blocks = blocks});
            const guarded_rows rows(device, 3 * 32);
            const auto before = rows.content();
            for (const std::uint64_t wrong : {std::uint64_t{60}, std::uint64_t{1} << 58, ~std::uint64_t{0}}) {
                const id_list list(device, {1, wrong, 2}, id_place::device);
                CHECK_THROWS_AS(exchange.gather(list.get(), rows.data()), invalid_argument);
                CHECK(rows.holds(before));
            }
            const id_list right(device, {1, 59, 2}, id_place::device);
            exchange.gather(right.get(), rows.data());
            CHECK(rows.holds(gathered(content, 32, {1, 59, 2})));
        }
    });
}

TEST_CASE("rows: several threads gather rows of one mapped file") {
    const temporary_folder folder;
    constexpr std::uint64_t row_count = 4000;
    write_random_rows(folder / "rows.npy", row_count, 64, 7);
    const array file = open_npy(folder / "rows.npy");
    const std::span content(file.view().data(), file.size_bytes());
    on_each_device([&](const device& device) {
        row_exchange exchange(row_table(file.rows()), device, {.threads = 3});
        std::atomic<int> wrong = 0;
        const auto gather_some = [&](std::uint64_t seed) {
            std::mt19937_64 random(seed);
            const id_vector ids = make_ids(id_order::random, 1500, row_count, random);
            const guarded_rows rows(device, ids.size() * 512);
            exchange.gather(ids_of(ids), rows.data());
            if (!rows.holds(gathered(content, 512, ids))) ++wrong;
        };
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 4; ++t) {
            threads.emplace_back([&, t] {
                for (unsigned i = 0; i < 10; ++i)
                    gather_some(t * 10 + i);
            });
        }
        for (std::thread& thread : threads)
            thread.join();
        CHECK(wrong == 0);
    });
}

TEST_CASE("rows: rows of an array in memory are gathered, even if they have no bytes") {
    on_each_route([](const device& device, row_route route) {
        const array numbers = numbered_rows(100, 3);
        const guarded_rows rows(device, 5 * 24);
        const id_vector ids{99, 0, 50, 50, 1};
        row_exchange exchange(row_table(numbers.rows()), device, {.route = route});
        exchange.gather(ids_of(ids), rows.data());
        CHECK(rows.holds(gathered({numbers.view().data(), numbers.size_bytes()}, 24, ids)));

        const array nothing = array_of<float>({}, {10, 0});
        row_exchange of_nothing(row_table(nothing.rows()), device, {.route = route});
        of_nothing.gather(ids_of({9, 0, 9}), rows.data());
        CHECK_THROWS_AS(of_nothing.gather(ids_of(ids), rows.data()), invalid_argument);
        CHECK(rows.holds(gathered({numbers.view().data(), numbers.size_bytes()}, 24, ids)));
    });
}

TEST_CASE("rows: a table without rows gathers none of them") {
    on_each_route([](const device& device, row_route route) {
        row_exchange exchange(row_table(std::span<std::byte>(), 8), device, {.route = route});
        exchange.gather(std::span<const std::uint64_t>(), nullptr);
        exchange.scatter(std::span<const std::uint64_t>(), nullptr);
        const id_vector ids{0};
        const guarded_rows rows(device, 8);
        CHECK_THROWS_AS(exchange.gather(ids_of(ids), rows.data()), invalid_argument);
    });
}

TEST_CASE("rows: the last rows of tables above 4 GiB, and above 2^32 rows, are gathered") {
    constexpr std::uint64_t table_bytes = std::uint64_t{6} << 30;
    std::mt19937_64 random(5);
    on_each_device([&](const device& device) {
        // on the host, untouched pages take no memory
        const auto memory = std::make_shared<memory_region>(memory_region::anonymous(table_bytes));
        std::optional<pinned_pages> pages;
        if (device.kind() != device_kind::host) {
            pages.emplace(std::vector<pin_range>{{memory->bytes(), "a large table", memory}}, device,
                          pin_options{.budget_bytes = generous_pin_budget});
            pages->require();
        }
        for (const std::uint64_t row_bytes : {1U, 3U, 512U}) {
            CAPTURE(row_bytes);
            const std::uint64_t row_count = table_bytes / row_bytes;
            const std::uint64_t first_behind = (std::uint64_t{1} << 32) / row_bytes;
            const std::uint64_t registered_piece = (std::uint64_t{64} << 20) / row_bytes;
            id_vector ids{0,
                          1,
                          registered_piece,  // may lie across a boundary between registered pieces
                          70 * registered_piece,
                          first_behind - 1,
                          first_behind,
                          first_behind + 1,
                          first_behind + (random() % 1000),
                          (std::uint64_t{5} << 30) / row_bytes,
                          row_count - 2,
                          row_count - 1};
            for (std::size_t i = 0; i < 10; ++i)
                ids.push_back(ids[random() % ids.size()]);
            std::ranges::shuffle(ids, random);
            for (const row_route route : every_route) {
                INFO("route " << to_string(route));
                row_exchange exchange(row_table(memory->bytes(), row_bytes), device, {.route = route});
                const auto place = route == row_route::copy ? id_place::host : one_of(every_id_place, random);
                const id_list list(device, ids, place);
                const auto content = random_bytes(ids.size() * row_bytes, random);
                const guarded_rows written(device, content, 1);
                exchange.scatter(list.get(), written.data());
                std::vector<std::byte> expected(content.size());
                for (std::size_t i = 0; i < ids.size(); ++i) {
                    const auto last = ids.size() - 1 -
                                      static_cast<std::size_t>(
                                          std::ranges::find(ids.rbegin(), ids.rend(), ids[i]) - ids.rbegin());
                    std::memcpy(expected.data() + i * row_bytes, content.data() + last * row_bytes,
                                row_bytes);
                    REQUIRE(std::memcmp(memory->data() + ids[i] * row_bytes, expected.data() + i * row_bytes,
                                        row_bytes) == 0);
                }
                const guarded_rows read(device, content.size(), 2);
                exchange.gather(list.get(), read.data());
                CHECK(read.holds(expected));
                const id_vector outside{row_count, row_count + (std::uint64_t{1} << 32)};
                CHECK_THROWS_AS(exchange.gather(ids_of(outside), read.data()), invalid_argument);
            }
        }
    });
}

TEST_CASE("rows: a plan says how rows would travel, and why") {
    on_each_route([](const device& device, row_route route) {
        const guarded_table table(device, 4096);
        row_exchange exchange(row_table(table.bytes(), 64), device, {.route = route});
        for (const row_plan& plan : {exchange.plan_gather(32), exchange.plan_gather(8, 4)}) {
            if (route != row_route::automatic) CHECK(plan.route == route);
            CHECK(plan.route != row_route::automatic);
            CHECK_FALSE(plan.reason.empty());
        }
        CHECK_FALSE(exchange.plan_scatter(32).reason.empty());
        CHECK(exchange.device() == device);
        exchange.tune(32, 4);
        const row_plan plan = exchange.plan_gather(32);
        if (route != row_route::automatic) CHECK(plan.route == route);
        // there is nothing to choose on the host
        CHECK((plan.gbps > 0) == (route == row_route::automatic && device.kind() == device_kind::cuda));
    });
    CHECK(to_string(row_route::automatic) == "auto");
    CHECK(to_string(row_route::hybrid) == "hybrid");
}

namespace {

template <typename From>
constexpr bool gives_row_ids = std::is_convertible_v<From, row_ids>;

}  // namespace

TEST_CASE("row_ids: borrows any contiguous range of 64-bit integers in host memory") {
    const auto borrows = [](const row_ids& ids, const void* data, std::uint64_t size) {
        return ids.data() == data && ids.size() == size && !ids.on_device();
    };
    std::vector<std::uint64_t> numbers{4, 0, 4};
    const std::vector<std::uint64_t> constant{1, 2};
    std::vector<std::int64_t> with_sign{3, -1};
    const std::vector<std::int64_t> constant_with_sign{-2};
    std::array<std::uint64_t, 2> four_and_five{4, 5};
    const std::array<std::int64_t, 3> few_with_sign{0, 1, 2};
    const std::uint64_t plain[] = {7, 8, 9, 10};
    CHECK(borrows(numbers, numbers.data(), 3));
    CHECK(borrows(constant, constant.data(), 2));
    CHECK(borrows(with_sign, with_sign.data(), 2));
    CHECK(borrows(constant_with_sign, constant_with_sign.data(), 1));
    CHECK(borrows(four_and_five, four_and_five.data(), 2));
    CHECK(borrows(few_with_sign, few_with_sign.data(), 3));
    CHECK(borrows(plain, plain, 4));
    CHECK(borrows(std::span(numbers), numbers.data(), 3));
    CHECK(borrows(std::span(constant), constant.data(), 2));
    CHECK(borrows(std::span(with_sign).subspan(1), with_sign.data() + 1, 1));
    CHECK(borrows(std::span(few_with_sign), few_with_sign.data(), 3));
    CHECK(borrows(std::span<const std::uint64_t>(), nullptr, 0));
    CHECK(row_ids(with_sign).data()[1] == to_id(-1));

    // copying a row_ids copies the pointer, the count and on_device, not the indices
    row_ids ids = row_ids::on_device(numbers.data(), 3);
    const row_ids copy = ids;
    CHECK(copy.on_device());
    ids = constant;
    CHECK(borrows(ids, constant.data(), 2));
}

TEST_CASE("row_ids: refuses temporaries that own their numbers, and numbers of other types") {
    CHECK(gives_row_ids<std::vector<std::uint64_t>&>);
    CHECK(gives_row_ids<std::span<const std::uint64_t>>);
    CHECK(gives_row_ids<row_ids>);
    CHECK_FALSE(gives_row_ids<std::vector<std::uint64_t>>);
    CHECK_FALSE(gives_row_ids<const std::vector<std::uint64_t>>);
    CHECK_FALSE(gives_row_ids<std::array<std::int64_t, 2>>);
    CHECK_FALSE(gives_row_ids<std::vector<std::int32_t>&>);
    CHECK_FALSE(gives_row_ids<std::vector<double>&>);
    CHECK_FALSE(gives_row_ids<std::span<volatile std::uint64_t>>);
    CHECK_FALSE(gives_row_ids<std::deque<std::uint64_t>&>);
    CHECK_FALSE(gives_row_ids<std::uint64_t*>);
}

TEST_CASE("rows: vectors of indices can be passed to calls and groups directly") {
    on_each_device([](const device& device) {
        std::mt19937_64 random(12);
        const auto content = random_bytes(std::size_t{20} * 24, random);
        const guarded_table table(device, content);
        row_exchange exchange(row_table(table.bytes(), 24), device);
        const std::vector<std::uint64_t> some{19, 0, 7};
        const std::vector<std::int64_t> with_sign{1, 19};
        const guarded_rows rows(device, std::size_t{5} * 24);
        const stream stream(device);
        const row_gather known[] = {{some, rows.data()}, {with_sign, rows.data() + std::ptrdiff_t{3} * 24}};
        exchange.gather_group_async(known, stream);
        stream.synchronize();
        CHECK(rows.holds(gathered(content, 24, {19, 0, 7, 1, 19})));
        exchange.gather(with_sign, rows.data());
        // `rows` begins with rows 1 and 19, and row 7 of the gather before
        exchange.scatter(some, rows.data());
        CHECK(table.holds(scattered(content, 24, some, gathered(content, 24, {1, 19, 7}))));
        exchange.check();
    });
}
