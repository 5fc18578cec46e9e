#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "arrays.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"
#include "temporary_folder.hpp"

// Many calls of one exchange: of every kind, large ones and small ones by turns, for rows of each size.
// gather_test and scatter_test draw single calls, each with an exchange of its own.
using namespace pinflow;

namespace {

// 528 and 1552 are multiples of 16 that take several steps, which begin before the row
constexpr std::array<std::uint64_t, 11> row_sizes{1,    8,    100,    512,    528,    1552,
                                                  3000, 4096, 12'288, 65'536, 100'003};

std::uint64_t row_count_for(std::uint64_t row_bytes) {
    return std::clamp<std::uint64_t>((std::uint64_t{1} << 20) / row_bytes, 19, 700);
}

/// Indices below `row_count`, each at most once.
id_vector different_ids(std::size_t count, std::uint64_t row_count, std::mt19937_64& random) {
    id_vector ids(row_count);
    std::iota(ids.begin(), ids.end(), 0);
    std::ranges::shuffle(ids, random);
    ids.resize(std::min<std::size_t>(count, row_count));
    return ids;
}

/// Where call number `call` has its indices. The route copy takes only host memory.
id_place id_place_for(int call, row_route route) {
    const id_place place = every_id_place[static_cast<std::size_t>(call) % every_id_place.size()];
    return route == row_route::copy && place == id_place::device ? id_place::host : place;
}

/// A table of random rows and an exchange with it, through staging memory for few rows.
struct exchanged {
    exchanged(const device& device, row_route route, std::uint64_t row_size_bytes)
        : row_bytes(row_size_bytes),
          row_count(row_count_for(row_size_bytes)),
          random(row_size_bytes),
          content(random_bytes(row_count * row_bytes, random)),
          table(device, content),
          exchange(row_table(table.bytes(), row_bytes), device,
                   {.route = route, .staging_bytes = 5 * row_bytes + 100}) {}

    std::uint64_t row_bytes;
    std::uint64_t row_count;
    std::mt19937_64 random;
    std::vector<std::byte> content;  ///< what the table should hold
    guarded_table table;
    row_exchange exchange;
};

template <typename Body>
void on_each_route_and_size(Body body) {
    on_each_route([&](const device& device, row_route route) {
        for (const std::uint64_t row_bytes : row_sizes) {
            CAPTURE(row_bytes);
            body(device, route, row_bytes);
        }
    });
}

}  // namespace

TEST_CASE("row sizes: one exchange moves many and few rows in turns, in both directions") {
    on_each_route_and_size([](const device& device, row_route route, std::uint64_t row_bytes) {
        exchanged with(device, route, row_bytes);
        const stream stream(device);
        int call = 0;
        for (const std::size_t count : {std::size_t{7}, 2 * with.row_count, std::size_t{1}, with.row_count}) {
            CAPTURE(count);
            const id_vector read = make_ids(id_order::random, count, with.row_count, with.random);
            const id_list read_list(device, read, id_place_for(call++, route));
            const guarded_rows rows(device, count * row_bytes);
            with.exchange.gather(read_list.get(), rows.data());
            REQUIRE(rows.holds(gathered(with.content, row_bytes, read)));
            CHECK(rows.sentinels_left());

            const id_vector written = different_ids(count, with.row_count, with.random);
            const id_list written_list(device, written, id_place_for(call++, route));
            const auto new_content = random_bytes(written.size() * row_bytes, with.random);
            const guarded_rows source(device, new_content);
            with.exchange.scatter(written_list.get(), source.data());
            with.content = scattered(std::move(with.content), row_bytes, written, new_content);
            REQUIRE(with.table.holds(with.content));

            // one behind the other in a stream: the gather reads what the scatter has written
            with.exchange.scatter_async(read_list.get(), rows.data(), duplicate_policy::last, stream);
            with.content = scattered(std::move(with.content), row_bytes, read, rows.content());
            const guarded_rows again(device, count * row_bytes);
            with.exchange.gather_async(read_list.get(), again.data(), stream);
            stream.synchronize();
            REQUIRE(again.holds(gathered(with.content, row_bytes, read)));
            REQUIRE(with.table.holds(with.content));
            CHECK(with.table.sentinels_left());
            with.exchange.check();
        }
    });
}

TEST_CASE("row sizes: groups of large and small batches are moved as each batch would be") {
    on_each_route_and_size([](const device& device, row_route route, std::uint64_t row_bytes) {
        exchanged with(device, route, row_bytes);
        const stream stream(device);
        const std::array<std::size_t, 6> counts{3, 0, with.row_count, 1, with.row_count / 2, 0};
        std::vector<id_vector> ids;
        std::vector<id_list> lists;
        std::vector<guarded_rows> destinations;
        std::vector<guarded_rows> sources;
        std::vector<row_gather> gathers;
        std::vector<row_scatter> scatters;
        auto expected_table = with.content;
        for (std::size_t i = 0; i < counts.size(); ++i) {
            ids.push_back(make_ids(id_order::random, counts[i], with.row_count, with.random));
            lists.emplace_back(device, ids.back(), id_place_for(static_cast<int>(i), route));
            destinations.emplace_back(device, counts[i] * row_bytes);
            const auto new_content = random_bytes(counts[i] * row_bytes, with.random);
            sources.emplace_back(device, new_content);
            gathers.push_back({lists.back().get(), destinations.back().data()});
            scatters.push_back({lists.back().get(), sources.back().data()});
            expected_table = scattered(std::move(expected_table), row_bytes, ids.back(), new_content);
        }
        with.exchange.gather_group_async(gathers, stream);
        with.exchange.scatter_group_async(scatters, duplicate_policy::last, stream);
        stream.synchronize();
        for (std::size_t i = 0; i < counts.size(); ++i) {
            CHECK(destinations[i].holds(gathered(with.content, row_bytes, ids[i])));
            CHECK(destinations[i].sentinels_left());
        }
        CHECK(with.table.holds(expected_table));
        CHECK(with.table.sentinels_left());
        with.exchange.check();
    });
}

TEST_CASE("row sizes: rows of a file are gathered unchanged") {
    for (const std::uint64_t row_bytes : {8U, 3000U, 12'288U}) {
        CAPTURE(row_bytes);
        const temporary_folder folder;
        const std::uint64_t row_count = row_count_for(row_bytes);
        write_random_rows(folder / "rows.npy", row_count, row_bytes / 8, row_bytes);
        const array file = open_npy(folder / "rows.npy");
        const std::span content(file.view().data(), file.size_bytes());
        on_each_route([&](const device& device, row_route route) {
            std::mt19937_64 random(row_bytes);
            row_exchange exchange(row_table(file.rows()), device,
                                  {.route = route, .staging_bytes = 5 * row_bytes});
            int call = 0;
            for (const std::size_t count : {std::size_t{1}, 2 * row_count, std::size_t{31}}) {
                const id_vector ids = make_ids(id_order::random, count, row_count, random);
                const id_list list(device, ids, id_place_for(call++, route));
                const guarded_rows rows(device, count * row_bytes);
                exchange.gather(list.get(), rows.data());
                CHECK(rows.holds(gathered(content, row_bytes, ids)));
                CHECK(rows.sentinels_left());
            }
        });
    }
}

TEST_CASE("row sizes: calls without rows move nothing, alone, in groups and between others") {
    on_each_route([](const device& device, row_route route) {
        exchanged with(device, route, 100);
        const stream stream(device);
        const id_vector none;
        const guarded_rows untouched(device, 500);
        const auto before = untouched.content();
        const auto call_with_nothing = [&] {
            for (const row_ids& ids : {ids_of(none), row_ids::on_device(nullptr, 0)}) {
                for (std::byte* const rows : {untouched.data(), static_cast<std::byte*>(nullptr)}) {
                    with.exchange.gather(ids, rows);
                    with.exchange.gather_async(ids, rows, stream);
                    with.exchange.scatter(ids, rows);
                    with.exchange.scatter_async(ids, rows, duplicate_policy::last, stream);
                    const std::vector<row_gather> gathers(3, {ids, rows});
                    with.exchange.gather_group_async(gathers, stream);
                    const std::vector<row_scatter> scatters(3, {ids, rows});
                    with.exchange.scatter_group_async(scatters, duplicate_policy::last, stream);
                }
            }
            with.exchange.gather_group_async({}, stream);
            with.exchange.scatter_group_async({}, duplicate_policy::last, stream);
        };
        if (route != row_route::copy) call_with_nothing();  // it takes no indices in device memory
        with.exchange.gather(ids_of(none), untouched.data());
        const id_vector ids = make_ids(id_order::random, 50, with.row_count, with.random);
        const guarded_rows rows(device, ids.size() * 100);
        with.exchange.gather_async(ids_of(ids), rows.data(), stream);
        if (route != row_route::copy) call_with_nothing();
        stream.synchronize();
        with.exchange.check();
        CHECK(rows.holds(gathered(with.content, 100, ids)));
        CHECK(with.table.holds(with.content));
        CHECK(untouched.holds(before));
    });
}

TEST_CASE("row sizes: repeated rows of any size are added up") {
    on_each_device([](const device& device) {
        for (const row_route route :
             {row_route::automatic, row_route::direct, row_route::staged, row_route::hybrid}) {
            for (const std::size_t width : {2U, 25U, 128U, 750U, 1024U, 3072U, 16'384U}) {
                INFO("route " << to_string(route) << ", rows of " << width << " floats");
                constexpr std::uint64_t row_count = 11;
                const std::size_t row_bytes = width * sizeof(float);
                std::mt19937_64 random(width);
                const id_vector ids = make_ids(id_order::random, 30, row_count, random);
                // whole numbers, whose sums are exact
                std::vector<float> values(ids.size() * width);
                for (std::size_t i = 0; i < values.size(); ++i)
                    values[i] = static_cast<float>((i * 7 + ids[i / width]) % 64);
                std::vector<float> expected(row_count * width, -1.0F);
                for (const std::uint64_t id : ids)
                    std::fill_n(expected.data() + id * width, width, 0.0F);
                for (std::size_t i = 0; i < values.size(); ++i)
                    expected[ids[i / width] * width + i % width] += values[i];

                const std::vector<float> before(row_count * width, -1.0F);
                const guarded_table table(device, std::as_bytes(std::span(before)));
                const guarded_rows rows(device, std::as_bytes(std::span(values)));
                row_exchange exchange(row_table(table.bytes(), row_bytes, dtype::of<float>()), device,
                                      {.route = route, .staging_bytes = 5 * row_bytes});
                exchange.scatter(ids_of(ids), rows.data(), duplicate_policy::sum);
                CHECK(table.holds(std::as_bytes(std::span(expected))));
                CHECK(table.sentinels_left());
            }
        }
    });
}
