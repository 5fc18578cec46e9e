#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "devices.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"

// A gather and a scatter of one table at the same time, on two streams. With many rows, a GPU's kernels wait
// for each other.
using namespace pinflow;

namespace {

id_vector shuffled(id_vector ids, std::mt19937_64& random) {
    std::ranges::shuffle(ids, random);
    return ids;
}

}  // namespace

TEST_CASE(
    "both ways: a gather and a scatter of other rows of the table at the same time move their own rows") {
    constexpr std::size_t row_count = sanitized ? 4000 : 260'000;
    for (const std::uint64_t row_bytes : {256U, 516U, 528U}) {
        CAPTURE(row_bytes);
        std::mt19937_64 random(row_bytes);
        on_each_device([&](const device& device) {
            std::vector<std::byte> content = random_bytes(row_count * row_bytes, random);
            const guarded_table table(device, content);
            row_exchange exchange(row_table(table.bytes(), row_bytes), device,
                                  {.route = row_route::direct, .max_batch_rows = row_count});
            const stream gathering(device);
            const stream scattering(device);
            // of different sizes, so that each direction is ahead at times
            struct call_sizes {
                std::size_t gathered, scattered;
            };
            for (const call_sizes& sizes :
                 {call_sizes{row_count / 2, row_count / 2}, call_sizes{row_count * 2 / 5, row_count * 3 / 5},
                  call_sizes{row_count / 7, row_count / 7}}) {
                id_vector ids(row_count);
                std::iota(ids.begin(), ids.end(), 0);
                ids = shuffled(std::move(ids), random);
                const std::span all(ids);
                const auto read = all.first(sizes.gathered);
                const auto written = all.subspan(sizes.gathered, sizes.scattered);
                const guarded_rows rows(device, read.size() * row_bytes);
                const auto new_content = random_bytes(written.size() * row_bytes, random);
                const guarded_rows source(device, new_content);
                exchange.gather_async(read, rows.data(), gathering);
                exchange.scatter_async(written, source.data(), duplicate_policy::error, scattering);
                gathering.synchronize();
                scattering.synchronize();
                CHECK(rows.holds(gathered(content, row_bytes, id_vector(read.begin(), read.end()))));
                content = scattered(std::move(content), row_bytes, id_vector(written.begin(), written.end()),
                                    new_content);
                CHECK(table.holds(content));
                CHECK(rows.sentinels_left());
                CHECK(table.sentinels_left());
            }
            exchange.check();
        });
    }
}
