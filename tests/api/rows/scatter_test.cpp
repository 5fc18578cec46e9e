#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "file_bytes.hpp"
#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"

using namespace pinflow;

namespace {

/// IEEE 754's binary16.
struct half_bits {
    std::uint16_t bits;
};
/// The upper half of a float.
struct bfloat16_bits {
    std::uint16_t bits;
};

/// Converts a float that binary16 holds exactly: 0, or of a magnitude of at least 2^-14.
half_bits half_of(float number) {
    const auto bits = std::bit_cast<std::uint32_t>(number);
    const std::uint32_t sign = bits >> 31 << 15;
    if (number == 0.0F) return {static_cast<std::uint16_t>(sign)};
    REQUIRE((bits & 0x1FFF) == 0);
    const std::uint32_t exponent = (bits >> 23 & 0xFF) - (127 - 15);
    return {static_cast<std::uint16_t>(sign | exponent << 10 | (bits >> 13 & 0x3FF))};
}

/// Converts a float that bfloat16 holds exactly.
bfloat16_bits bfloat16_of(float number) {
    const auto bits = std::bit_cast<std::uint32_t>(number);
    REQUIRE((bits & 0xFFFF) == 0);
    return {static_cast<std::uint16_t>(bits >> 16)};
}

/// The routes that write by every policy.
constexpr std::array summing_routes{row_route::automatic, row_route::direct, row_route::staged,
                                    row_route::hybrid};

template <typename Body>
void on_each_summing_route(Body body) {
    on_each_device([&](const device& device) {
        for (const row_route route : summing_routes) {
            INFO("route " << to_string(route));
            body(device, route);
        }
    });
}

template <typename Value>
std::vector<std::byte> bytes_of(const std::vector<Value>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    return {bytes.begin(), bytes.end()};
}

template <typename Value>
dtype type_of() {
    if constexpr (std::is_same_v<Value, half_bits>)
        return dtype::parse("<f2");
    else if constexpr (std::is_same_v<Value, bfloat16_bits>)
        return dtype::parse("bfloat16");
    else
        return dtype::of<Value>();
}

template <typename Value>
Value value_of(float number) {
    if constexpr (std::is_same_v<Value, half_bits>)
        return half_of(number);
    else if constexpr (std::is_same_v<Value, bfloat16_bits>)
        return bfloat16_of(number);
    else
        return static_cast<Value>(number);
}

/// Scatters `values` to the only row of a table with `duplicate_policy::sum`, and returns the stored sum.
template <typename Value>
Value sum_of(const device& device, row_route route, const std::vector<Value>& values) {
    const guarded_table table(device, bytes_of(std::vector<Value>{Value{}}));
    const guarded_rows rows(device, bytes_of(values));
    row_exchange exchange(row_table(table.bytes(), sizeof(Value), type_of<Value>()), device,
                          {.route = route});
    const id_vector ids(values.size(), 0);
    exchange.scatter(ids_of(ids), rows.data(), duplicate_policy::sum);
    CHECK(table.sentinels_left());
    Value sum{};
    std::memcpy(&sum, table.bytes().data(), sizeof sum);
    return sum;
}

template <typename Value>
void check_random_sums(const device& device, row_route route) {
    std::mt19937_64 random(20);
    for (const std::size_t width : {1U, 2U, 5U, 33U, 300U}) {
        CAPTURE(width);
        constexpr std::uint64_t row_count = 40;
        const std::size_t row_bytes = width * sizeof(Value);
        const std::size_t count = std::array<std::size_t, 3>{1, 25, 150}[random() % 3];
        const id_vector ids = make_ids(one_of(every_id_order, random), count, row_count, random);
        std::vector<Value> values(count * width);
        std::vector<float> sums(row_count * width);
        const auto before = random_bytes(row_count * row_bytes, random);
        for (std::size_t i = 0; i < values.size(); ++i) {
            // 0 or 1: every type holds their sums exactly
            const auto number = static_cast<float>(random() % 2);
            values[i] = value_of<Value>(number);
            sums[ids[i / width] * width + i % width] += number;
        }
        auto expected = before;
        for (const std::uint64_t id : ids) {
            for (std::size_t at = 0; at < width; ++at) {
                const auto sum = value_of<Value>(sums[id * width + at]);
                std::memcpy(expected.data() + id * row_bytes + at * sizeof sum, &sum, sizeof sum);
            }
        }
        // as little aligned as is allowed
        const guarded_table table(device, before, sizeof(Value));
        const guarded_rows rows(device, bytes_of(values), 3 * sizeof(Value));
        row_exchange exchange(row_table(table.bytes(), row_bytes, type_of<Value>()), device,
                              {.route = route, .staging_bytes = 5000});
        const id_list list(device, ids, one_of(every_id_place, random));
        exchange.scatter(list.get(), rows.data(), duplicate_policy::sum);
        CHECK(table.holds(expected));
        CHECK(table.sentinels_left());
    }
}

}  // namespace

TEST_CASE(
    "rows: every route scatters rows of any size, number, order and alignment, and writes nothing else") {
    on_each_route([](const device& device, row_route route) {
        for_combinations(route, 10, [&](const row_combination& drawn, std::mt19937_64& random) {
            const auto before = random_bytes(drawn.row_count * drawn.row_bytes, random);
            const guarded_table table(device, before, drawn.table_misalignment);
            const id_vector ids = make_ids(drawn.order, drawn.count, drawn.row_count, random);
            const id_list list(device, ids, drawn.place);
            const auto content = random_bytes(drawn.count * drawn.row_bytes, random);
            const guarded_rows rows(device, content, drawn.rows_misalignment);
            row_exchange exchange(row_table(table.bytes(), drawn.row_bytes), device, drawn.options);
            if (drawn.waits) {
                exchange.scatter(list.get(), rows.data());
            } else {
                const stream stream(device);
                exchange.scatter_async(list.get(), rows.data(), duplicate_policy::last, stream);
                stream.synchronize();
            }
            REQUIRE(table.holds(scattered(before, drawn.row_bytes, ids, content)));
            CHECK(table.sentinels_left());
            CHECK(rows.holds(content));
            exchange.check();
        });
    });
}

TEST_CASE("rows: a group of batches is scattered as one, so that the last batch with a row counts") {
    on_each_route([](const device& device, row_route route) {
        std::mt19937_64 random(11);
        for (const std::uint64_t row_bytes : {1U, 15U, 64U, 513U}) {
            constexpr std::uint64_t row_count = 100;
            for (const std::size_t batch_count : {0U, 1U, 3U, 64U, 65U, 130U}) {
                CAPTURE(batch_count);
                auto expected = random_bytes(row_count * row_bytes, random);
                const guarded_table table(device, expected, one_of(every_misalignment, random));
                row_exchange exchange(row_table(table.bytes(), row_bytes), device,
                                      {.route = route, .staging_bytes = 4000});
                std::vector<id_list> lists;
                std::vector<guarded_rows> sources;
                std::vector<row_scatter> batches;
                for (std::size_t i = 0; i < batch_count; ++i) {
                    const std::size_t count = random() % 3 == 0 ? 0 : random() % 30;
                    auto place = one_of(every_id_place, random);
                    if (route == row_route::copy && place == id_place::device) place = id_place::host_signed;
                    const id_vector ids = make_ids(one_of(every_id_order, random), count, row_count, random);
                    const auto content = random_bytes(count * row_bytes, random);
                    expected = scattered(std::move(expected), row_bytes, ids, content);
                    lists.emplace_back(device, ids, place);
                    sources.emplace_back(device, content, one_of(every_misalignment, random));
                    batches.push_back({lists.back().get(), sources.back().data()});
                }
                const stream stream(device);
                exchange.scatter_group_async(batches, duplicate_policy::last, stream);
                stream.synchronize();
                REQUIRE(table.holds(expected));
                CHECK(table.sentinels_left());
            }
        }
    });
}

TEST_CASE("rows: many rows pass through small staging buffers on their way to the table") {
    on_each_device([](const device& device) {
        // The device's rows are cached, the table is not: the copies run ahead of the CPU that scatters.
        constexpr std::uint64_t row_bytes = 16 << 10;
        constexpr std::size_t count = sanitized ? 1000 : 4000;
        std::mt19937_64 random(12);
        const auto content = random_bytes(count * row_bytes, random);
        const guarded_rows rows(device, content);
        id_vector ids(count);
        std::iota(ids.begin(), ids.end(), 0);
        std::ranges::shuffle(ids, random);
        const pinned_buffer table(count * row_bytes, device);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device,
                              {.route = row_route::staged, .staging_bytes = 128 << 10});
        exchange.scatter(ids_of(ids), rows.data());
        CHECK(same_bytes(table.bytes(),
                         scattered(std::vector<std::byte>(count * row_bytes), row_bytes, ids, content)));
    });
}

// ---- sums ---------------------------------------------------------------------------------------

TEST_CASE("rows: of many repeated rows the last one is written, whatever the size of a row") {
    on_each_device([](const device& device) {
        std::mt19937_64 random(14);
        for (const std::size_t row_bytes : {1U, 16U, 100U, 1024U}) {
            CAPTURE(row_bytes);
            constexpr std::size_t table_rows = 700;
            const auto content = random_bytes(table_rows * row_bytes, random);
            id_vector ids(5000);
            for (auto& id : ids)
                id = random() % table_rows;
            const auto rows = random_bytes(ids.size() * row_bytes, random);
            const guarded_rows from(device, rows);
            for (const row_route route : {row_route::automatic, row_route::direct}) {
                const guarded_table table(device, content);
                row_exchange exchange(row_table(table.bytes(), row_bytes), device, {.route = route});
                exchange.scatter(ids_of(ids), from.data());
                CHECK(table.holds(scattered(content, row_bytes, ids, rows)));
                CHECK(exchange.plan_scatter(ids.size()).sorted == (device.kind() != device_kind::host));
            }
        }
    });
}

TEST_CASE("rows: repeated rows are added up, whatever their type and number") {
    on_each_summing_route([](const device& device, row_route route) {
        check_random_sums<half_bits>(device, route);
        check_random_sums<bfloat16_bits>(device, route);
        check_random_sums<float>(device, route);
        check_random_sums<double>(device, route);
        check_random_sums<std::int32_t>(device, route);
        check_random_sums<std::uint32_t>(device, route);
        check_random_sums<std::int64_t>(device, route);
        check_random_sums<std::uint64_t>(device, route);
    });
}

TEST_CASE("rows: sums are added up in the order of the indices, 16-bit floats in float32 and rounded once") {
    on_each_summing_route([](const device& device, row_route route) {
        CHECK(sum_of<float>(device, route, {1e8F, 1.0F, -1e8F}) == 0.0F);
        CHECK(sum_of<float>(device, route, {1e8F, -1e8F, 1.0F}) == 1.0F);
        CHECK(sum_of<double>(device, route, {1e17, 1.0, -1e17}) == 0.0);
        CHECK(sum_of<double>(device, route, {1e17, -1e17, 1.0}) == 1.0);
        CHECK(std::isinf(sum_of<float>(device, route, {3e38F, 3e38F, -3e38F})));

        // if each step were rounded, each 1 would be lost beside 2048 (bfloat16: 256)
        std::vector<half_bits> halves(9, value_of<half_bits>(1));
        halves[0] = value_of<half_bits>(2048);
        CHECK(sum_of(device, route, halves).bits == value_of<half_bits>(2056).bits);
        std::vector<bfloat16_bits> brains(9, value_of<bfloat16_bits>(1));
        brains[0] = value_of<bfloat16_bits>(256);
        CHECK(sum_of(device, route, brains).bits == value_of<bfloat16_bits>(264).bits);
        // as float, 2^24 + 1 stays 2^24
        CHECK(sum_of<bfloat16_bits>(device, route,
                                    {value_of<bfloat16_bits>(16777216), value_of<bfloat16_bits>(1),
                                     value_of<bfloat16_bits>(-16777216)})
                  .bits == 0);

        constexpr auto most = std::numeric_limits<std::int32_t>::max();
        CHECK(sum_of<std::int32_t>(device, route, {most, 1}) == std::numeric_limits<std::int32_t>::min());
        CHECK(sum_of<std::uint64_t>(device, route, {~std::uint64_t{0}, 3}) == 2);
    });
}

TEST_CASE("rows: a row that is summed alone keeps its exact bits") {
    on_each_summing_route([](const device& device, row_route route) {
        CHECK(std::bit_cast<std::uint32_t>(
                  sum_of<float>(device, route, {std::bit_cast<float>(0x7FA01234U)})) == 0x7FA01234U);
        CHECK(sum_of<half_bits>(device, route, {half_bits{0x7D55}}).bits == 0x7D55);
        CHECK(sum_of<bfloat16_bits>(device, route, {bfloat16_bits{0x7FA1}}).bits == 0x7FA1);
        CHECK(std::signbit(sum_of<float>(device, route, {-0.0F})));
    });
}

TEST_CASE("rows: sums go over all batches of a group, and over the pieces of the staged route") {
    on_each_summing_route([](const device& device, row_route route) {
        constexpr std::size_t width = 10;
        std::vector<float> rows(3 * 50 * width);
        for (std::size_t i = 0; i < rows.size(); ++i)
            rows[i] = static_cast<float>(i % 7);
        const guarded_rows source(device, bytes_of(rows));
        const guarded_table table(device, bytes_of(std::vector<float>(5 * width, -1.0F)));
        row_exchange exchange(row_table(table.bytes(), width * sizeof(float), dtype::of<float>()), device,
                              {.route = route, .staging_bytes = 300});
        std::vector<id_vector> ids;
        std::vector<row_scatter> batches;
        std::vector<float> expected(5 * width, -1.0F);
        std::ranges::fill(std::span(expected).subspan(width, width), 0.0F);
        std::ranges::fill(std::span(expected).subspan(3 * width, width), 0.0F);
        for (std::size_t batch = 0; batch < 3; ++batch) {
            id_vector& of_batch = ids.emplace_back(50);
            for (std::size_t i = 0; i < 50; ++i) {
                of_batch[i] = i % 3 == 0 ? 1 : 3;
                for (std::size_t at = 0; at < width; ++at)
                    expected[of_batch[i] * width + at] += rows[(batch * 50 + i) * width + at];
            }
        }
        for (std::size_t batch = 0; batch < 3; ++batch)
            batches.push_back({ids_of(ids[batch]), source.data() + batch * 50 * width * sizeof(float)});
        const stream stream(device);
        exchange.scatter_group_async(batches, duplicate_policy::sum, stream);
        stream.synchronize();
        CHECK(table.holds(bytes_of(expected)));
        CHECK(table.sentinels_left());
    });
}

TEST_CASE("rows: sums of unsupported types and unaligned rows are refused, and nothing is written") {
    on_each_device([](const device& device) {
        const id_vector ids{0, 1, 1};
        const auto refused = [&](std::string_view type, std::uint64_t row_bytes, std::size_t table_off,
                                 std::size_t rows_off, row_route route = row_route::automatic) {
            const guarded_table table(device, 4 * row_bytes, table_off);
            const std::vector<std::byte> before(table.bytes().begin(), table.bytes().end());
            const guarded_rows rows(device, 3 * row_bytes, rows_off);
            row_exchange exchange(row_table(table.bytes(), row_bytes, dtype::parse(type)), device,
                                  {.route = route});
            const std::string reason = message_of<unsupported>(
                [&] { exchange.scatter(ids_of(ids), rows.data(), duplicate_policy::sum); });
            CHECK(table.holds(before));
            exchange.scatter(ids_of(ids), rows.data());
            CHECK(table.holds(scattered(before, row_bytes, ids, rows.content())));
            return reason;
        };
        for (const std::string type : {"|u1", "|i1", "<i2", "<u2", "|b1", "<c8"})
            CHECK(contains(refused(type, 16, 0, 0),
                           "cannot add up rows of " + type + ": only floats and integers"));
        for (const std::string type : {">f4", ">f8", ">i4", ">u8", ">f2"})
            CHECK(
                contains(refused(type, 16, 0, 0), "cannot add up rows of " + type + ": only little-endian"));
        for (const auto& [type, size_bytes] : {std::pair("<f4", 4), {"<f8", 8}, {"bfloat16", 2}}) {
            const std::string expected = "is not a multiple of " + std::to_string(size_bytes);
            const std::string of_table = refused(type, 16, static_cast<std::size_t>(size_bytes / 2), 0);
            CHECK(contains(of_table, expected));
            CHECK(contains(of_table, "the address 0x"));
            const std::string of_batch = refused(type, 16, 0, 1);
            CHECK(contains(of_batch, expected));
            CHECK(contains(of_batch, "batch 0"));
        }
        CHECK(contains(refused("<f4", 16, 0, 0, row_route::copy), "the route copy"));
    });
}

// ---- refusing repeated rows ---------------------------------------------------------------------

TEST_CASE("rows: repeated rows that are an error write nothing, and are reported") {
    on_each_summing_route([](const device& device, row_route route) {
        std::mt19937_64 random(13);
        constexpr std::uint64_t row_bytes = 24;
        const auto before = random_bytes(50 * row_bytes, random);
        const guarded_table table(device, before);
        const auto content = random_bytes(40 * row_bytes, random);
        const guarded_rows rows(device, content);
        row_exchange exchange(row_table(table.bytes(), row_bytes), device,
                              {.route = route, .staging_bytes = 200});
        for (const id_place place : every_id_place) {
            // 7 again at positions 3 and 5, 8 at position 6
            const id_vector repeated{7, 9, 8, 7, 0, 7, 8};
            const id_list list(device, repeated, place);
            const std::string reason = message_of<invalid_argument>(
                [&] { exchange.scatter(list.get(), rows.data(), duplicate_policy::error); });
            CAPTURE(reason);
            CHECK(contains_all(reason, {"a table in memory", "not scattered", "3 of 7", "are repeated",
                                        "duplicate_policy::error", "the first is 7,", "at position 3"}));
            CHECK(table.holds(before));
            exchange.check();
        }
        // across the batches of a group
        const stream stream(device);
        const id_vector first{1, 2, 3};
        const id_vector second{4, 2};
        const std::vector<row_scatter> batches{{ids_of(first), rows.data()},
                                               {ids_of(second), rows.data() + 3 * row_bytes}};
        exchange.scatter_group_async(batches, duplicate_policy::error, stream);
        stream.synchronize();
        CHECK(table.holds(before));
        CHECK(contains(message_of<invalid_argument>([&] { exchange.check(); }),
                       "1 of 5 indices is repeated, which duplicate_policy::error refuses: the first is 2, "
                       "at position 4"));
        exchange.check();

        id_vector different(40);
        std::iota(different.begin(), different.end(), 5);
        std::ranges::shuffle(different, random);
        exchange.scatter(ids_of(different), rows.data(), duplicate_policy::error);
        CHECK(table.holds(scattered(before, row_bytes, different, content)));
        CHECK(table.sentinels_left());
    });
}
