#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "file_bytes.hpp"
#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"

// Indices outside the table. rows_errors_test has more of them, and the whole messages.
using namespace pinflow;

namespace {

constexpr std::uint64_t row_count = 60;

/// A table, and rows that take part in calls which must move nothing.
struct exchanged {
    exchanged(const device& device, row_route route, std::uint64_t row_size_bytes)
        : row_bytes(row_size_bytes),
          content(random_bytes(row_count * row_bytes, random)),
          table(device, content),
          rows(device, 10 * row_bytes),
          rows_before(rows.content()),
          exchange(row_table(table.bytes(), row_bytes), device,
                   {.route = route, .staging_bytes = 3 * row_bytes}) {}

    bool nothing_moved() const {
        return table.holds(content) && table.sentinels_left() && rows.holds(rows_before) &&
               rows.sentinels_left();
    }
    bool still_works() {
        const id_vector ids = make_ids(id_order::random, 10, row_count, random);
        exchange.gather(ids_of(ids), rows.data());
        const bool is_right = rows.holds(gathered(content, row_bytes, ids));
        exchange.scatter(ids_of(ids), rows.data());  // to where they came from
        return is_right && table.holds(content);
    }

    std::mt19937_64 random{70};
    std::uint64_t row_bytes;
    std::vector<std::byte> content;
    guarded_table table;
    guarded_rows rows;
    std::vector<std::byte> rows_before;
    row_exchange exchange;
};

struct wrong_list {
    id_vector ids;
    std::string first_wrong;
};

const std::vector<wrong_list> every_wrong_list{
    {{row_count}, "60"},
    {{0, 59, 61, 1, 99, 2}, "61"},
    {{5, to_id(-1)}, "-1"},
    {{0, (std::uint64_t{1} << 32) + 3}, "4294967299"},
};

template <typename Body>
void on_each_route_and_size(Body body) {
    on_each_route([&](const device& device, row_route route) {
        for (const std::uint64_t row_bytes : {8U, 512U, 3000U, 12'288U}) {
            CAPTURE(row_bytes);
            exchanged with(device, route, row_bytes);
            body(with, device, route);
        }
    });
}

}  // namespace

TEST_CASE("wrong ids: host indices are refused before the call returns, and nothing moves") {
    on_each_route_and_size([](exchanged& with, const device& device, row_route) {
        const stream stream(device);
        for (const auto& [ids, first_wrong] : every_wrong_list) {
            for (const id_place place : {id_place::host, id_place::host_signed}) {
                const id_list list(device, ids, place);
                const auto is_reported = [&, &number = first_wrong](auto call) {
                    return contains(message_of<invalid_argument>(call), number);
                };
                CHECK(is_reported([&] { with.exchange.gather(list.get(), with.rows.data()); }));
                CHECK(is_reported([&] { with.exchange.gather_async(list.get(), with.rows.data(), stream); }));
                CHECK(is_reported([&] { with.exchange.scatter(list.get(), with.rows.data()); }));
                CHECK(is_reported([&] {
                    with.exchange.scatter_async(list.get(), with.rows.data(), duplicate_policy::last, stream);
                }));
            }
        }
        stream.synchronize();
        with.exchange.check();
        CHECK(with.nothing_moved());
        CHECK(with.still_works());
    });
}

TEST_CASE("wrong ids: one wrong index in any batch stops the whole group, and is reported") {
    on_each_route_and_size([](exchanged& with, const device& device, row_route route) {
        const stream stream(device);
        const id_vector right{1, 2, 3};
        const id_vector wrong{4, 77};
        for (std::size_t wrong_batch = 0; wrong_batch < 3; ++wrong_batch) {
            for (const id_place place : {id_place::host, id_place::device}) {
                if (route == row_route::copy && place == id_place::device) continue;
                CAPTURE(wrong_batch);
                std::vector<id_list> lists;
                for (std::size_t i = 0; i < 3; ++i)
                    lists.emplace_back(device, i == wrong_batch ? wrong : right, place);
                std::vector<row_gather> gathers;
                std::vector<row_scatter> scatters;
                for (const id_list& list : lists) {
                    gathers.push_back({list.get(), with.rows.data() + gathers.size() * 3 * with.row_bytes});
                    scatters.push_back({list.get(), with.rows.data() + scatters.size() * 3 * with.row_bytes});
                }
                // indices in device memory are checked when the stream reaches the call
                const auto is_reported = [&](auto call) {
                    return contains(message_of<invalid_argument>([&] {
                                        call();
                                        stream.synchronize();
                                        with.exchange.check();
                                    }),
                                    "77");
                };
                CHECK(is_reported([&] { with.exchange.gather_group_async(gathers, stream); }));
                CHECK(is_reported(
                    [&] { with.exchange.scatter_group_async(scatters, duplicate_policy::last, stream); }));
                with.exchange.check();
                CHECK(with.nothing_moved());
            }
        }
        CHECK(with.still_works());
    });
}

TEST_CASE("wrong ids: a copy of the indices is checked, so a thread may change them during a call") {
    if (sanitized) return;  // sanitizers report the race that this test makes
    on_each_device([](const device& device) {
        constexpr std::size_t count = 4096;
        exchanged with(device, row_route::direct, 64);
        guarded_rows rows(device, count * with.row_bytes);
        id_vector ids(count, 7);
        const std::atomic_ref changing(ids.back());
        std::jthread changer([&](const std::stop_token& stop) {
            while (!stop.stop_requested()) {
                // far outside of the address space, and one byte apart from 7: memcpy may copy bytes of both
                changing = to_id(7 | std::int64_t{1} << 40);
                changing = 7;
            }
        });
        const std::vector<std::byte> right = gathered(with.content, with.row_bytes, id_vector(count, 7));
        int refused = 0;
        for (int call = 0; call < 1000; ++call) {
            try {
                with.exchange.gather(ids_of(ids), rows.data());
                REQUIRE(rows.holds(right));
            } catch (const invalid_argument&) {
                ++refused;
            }
        }
        CHECK(refused > 0);
    });
}

TEST_CASE("wrong ids: a call with wrong device indices moves nothing, and is reported once") {
    on_each_route_and_size([](exchanged& with, const device& device, row_route route) {
        if (route == row_route::copy) return;  // takes indices in host memory only
        const stream stream(device);
        for (const auto& [ids, first_wrong] : every_wrong_list) {
            const id_list list(device, ids, id_place::device);
            CHECK(contains(
                message_of<invalid_argument>([&] { with.exchange.gather(list.get(), with.rows.data()); }),
                first_wrong));
            CHECK(contains(
                message_of<invalid_argument>([&] { with.exchange.scatter(list.get(), with.rows.data()); }),
                first_wrong));
            with.exchange.check();
            with.exchange.gather_async(list.get(), with.rows.data(), stream);
            stream.synchronize();
            CHECK(contains(message_of<invalid_argument>([&] { with.exchange.check(); }), first_wrong));
            with.exchange.check();
        }
        CHECK(with.nothing_moved());
        CHECK(with.still_works());
    });
}
