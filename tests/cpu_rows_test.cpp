#include "src/rows/cpu_rows.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "pinflow/device.hpp"
#include "tests/support/row_tables.hpp"

using namespace pinflow;
using detail::kept_duplicate;

namespace {

/// Whether the row at `index` is copied, by the definition of kept_duplicate. Equal indices must be adjacent.
bool should_count(const id_vector& ids, std::size_t index, kept_duplicate which) {
    if (which == kept_duplicate::first) return index == 0 || ids[index - 1] != ids[index];
    if (which == kept_duplicate::last) return index + 1 == ids.size() || ids[index + 1] != ids[index];
    return true;
}

}  // namespace

TEST_CASE("cpu_rows: rows of any size and alignment are copied both ways, and no other bytes are") {
    const device host = device::host();
    std::mt19937_64 random(50);
    for (std::uint64_t row_bytes = 1; row_bytes <= 300; ++row_bytes) {
        CAPTURE(row_bytes);
        for (std::size_t table_off = 0; table_off < 16; table_off += 1 + random() % 3) {
            const std::size_t slot_off = random() % 16;
            const auto content = random_bytes(20 * row_bytes, random);
            const guarded_table table(host, content, table_off);
            const id_vector ids = make_ids(id_order::random, 20, 20, random);
            const std::size_t begin = random() % 20;
            const std::size_t end = begin + random() % (21 - begin);
            const id_vector moved(ids.begin() + static_cast<std::ptrdiff_t>(begin),
                                  ids.begin() + static_cast<std::ptrdiff_t>(end));
            const guarded_table slot(host, moved.size() * row_bytes, slot_off);
            detail::gather_on_cpu(table.bytes().data(), {ids, begin, end, row_bytes}, kept_duplicate::all,
                                  slot.bytes().data());
            REQUIRE(slot.holds(gathered(content, row_bytes, moved)));
            REQUIRE(slot.sentinels_left());
            REQUIRE(table.holds(content));

            const auto rows = random_bytes(moved.size() * row_bytes, random);
            std::ranges::copy(rows, slot.bytes().begin());
            detail::scatter_on_cpu(table.bytes().data(), {ids, begin, end, row_bytes}, kept_duplicate::all,
                                   slot.bytes().data());
            REQUIRE(table.holds(scattered(content, row_bytes, moved, rows)));
            REQUIRE(table.sentinels_left());
        }
    }
}

TEST_CASE("cpu_rows: large rows of any alignment are copied whole") {
    const device host = device::host();
    std::mt19937_64 random(51);
    for (const std::uint64_t row_bytes : {1021U, 4096U, 65'537U, 1U << 20}) {
        for (const std::size_t misalignment : every_misalignment) {
            const auto content = random_bytes(3 * row_bytes, random);
            const guarded_table table(host, content, misalignment);
            const guarded_table slot(host, 3 * row_bytes, one_of(every_misalignment, random));
            const id_vector ids{2, 0, 2};
            detail::gather_on_cpu(table.bytes().data(), {ids, 0, 3, row_bytes}, kept_duplicate::all,
                                  slot.bytes().data());
            CHECK(slot.holds(gathered(content, row_bytes, ids)));
            CHECK(slot.sentinels_left());
        }
    }
}

TEST_CASE("cpu_rows: of equal indices the first, or the last, or all are copied, also across pieces") {
    const device host = device::host();
    std::mt19937_64 random(52);
    constexpr std::uint64_t row_bytes = 13;
    const auto content = random_bytes(8 * row_bytes, random);
    for (const id_vector& ids : {id_vector{0, 0, 0, 1, 2, 2, 5, 7, 7}, id_vector{3}, id_vector{4, 4},
                                 id_vector{0, 1, 2, 3}, id_vector(9, 6)}) {
        for (const kept_duplicate which :
             {kept_duplicate::all, kept_duplicate::first, kept_duplicate::last}) {
            for (std::size_t piece = 1; piece <= ids.size(); ++piece) {
                const guarded_table table(host, content);
                const guarded_table slot(host, ids.size() * row_bytes);
                auto expected = std::vector<std::byte>(slot.bytes().begin(), slot.bytes().end());
                for (std::size_t i = 0; i < ids.size(); ++i) {
                    if (!should_count(ids, i, which)) continue;
                    std::memcpy(expected.data() + i * row_bytes, content.data() + ids[i] * row_bytes,
                                row_bytes);
                }
                for (std::size_t begin = 0; begin < ids.size(); begin += piece) {
                    detail::gather_on_cpu(table.bytes().data(),
                                          {ids, begin, std::min(begin + piece, ids.size()), row_bytes}, which,
                                          slot.bytes().data() + begin * row_bytes);
                }
                CHECK(slot.holds(expected));

                const auto rows = random_bytes(ids.size() * row_bytes, random);
                std::ranges::copy(rows, slot.bytes().begin());
                auto written = content;
                for (std::size_t i = 0; i < ids.size(); ++i) {
                    if (!should_count(ids, i, which)) continue;
                    std::memcpy(written.data() + ids[i] * row_bytes, rows.data() + i * row_bytes, row_bytes);
                }
                for (std::size_t begin = 0; begin < ids.size(); begin += piece) {
                    detail::scatter_on_cpu(table.bytes().data(),
                                           {ids, begin, std::min(begin + piece, ids.size()), row_bytes},
                                           which, slot.bytes().data() + begin * row_bytes);
                }
                CHECK(table.holds(written));
                CHECK(table.sentinels_left());
            }
        }
    }
}
