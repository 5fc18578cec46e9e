#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "devices.hpp"
#include "pinflow/error.hpp"
#include "pinflow/train/embedding_table.hpp"
#include "sanitized.hpp"

using namespace pinflow;

namespace {

embedding_options options_for(std::uint64_t rows, std::uint64_t max_ids) {
    embedding_options options;
    options.row_count = rows;
    options.columns = 6;
    options.rule = adam{};
    options.weights = normal_weights(0, 1, 27);
    options.max_batch_ids = max_ids;
    return options;
}

/// Numbers in device memory.
template <typename Number>
class device_array {
 public:
    device_array(const std::vector<Number>& values, stream_view stream)
        : host_(values.size() * sizeof(Number), stream.device()), memory_(host_.size_bytes(), stream) {
        set(values, stream);
    }
    void set(const std::vector<Number>& values, stream_view stream) {
        std::memcpy(host_.data(), values.data(), host_.size_bytes());
        copy_to_device_async(memory_.data(), host_.bytes(), stream);
        stream.synchronize();
    }
    const std::byte* data() const { return memory_.data(); }
    row_ids ids() const { return row_ids::on_device(memory_.data(), host_.size_bytes() / sizeof(Number)); }

 private:
    pinned_buffer host_;
    device_buffer memory_;
};

template <typename Number>
std::vector<Number> read(const Number* data, std::uint64_t count, stream_view stream) {
    std::vector<Number> numbers(count);
    if (count == 0) return numbers;
    copy_to_host_async(std::as_writable_bytes(std::span(numbers)), reinterpret_cast<const std::byte*>(data),
                       stream);
    stream.synchronize();
    return numbers;
}

std::vector<std::uint64_t> random_ids(std::uint64_t rows, std::size_t count, std::mt19937_64& random) {
    std::vector<std::uint64_t> ids(count);
    for (std::uint64_t& id : ids)
        id = random() % 2 == 0 ? random() % rows : random() % (rows / 10 + 1);
    return ids;
}

std::vector<std::byte> weights_of(embedding_table& table) {
    const embedding_options& options = table.options();
    std::vector<std::uint64_t> ids(options.row_count);
    for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = i;
    std::vector<std::byte> weights(ids.size() * options.columns * options.type.size_bytes());
    table.read_weights(ids, weights);
    return weights;
}

}  // namespace

TEST_CASE(
    "embedding table: ids in device memory give a lease with each row once, and the count on the device") {
    on_each_device([&](const device& device) {
        std::mt19937_64 random(1);
        // from one to many tiles of the kernel that groups them
        for (const std::uint64_t count : {1U, 2U, 100U, 2048U, 2049U, 20'000U, 300'000U}) {
            for (const std::uint64_t device_rows : {0U, 1U, 500U, 1000U}) {
                CAPTURE(count);
                CAPTURE(device_rows);
                embedding_options options = options_for(1000, count);
                options.device_rows = device_rows;
                options.look_ahead = 0;
                embedding_table table(options, device);
                const stream stream(device);
                const auto ids = random_ids(1000, count, random);
                device_array<std::uint64_t> sent(ids, stream);
                const embedding_lease lease = table.fetch(sent.ids(), stream);
                // later work of the stream may overwrite them
                sent.set(std::vector<std::uint64_t>(count, 7), stream);
                const std::set<std::uint64_t> different(ids.begin(), ids.end());
                CHECK(lease.row_count() == count);
                CHECK(lease.position_count() == count);
                REQUIRE(read(lease.device_row_count(), 1, stream).front() == different.size());
                const auto found = read(lease.device_ids(), different.size(), stream);
                CHECK(std::ranges::equal(found, different));
                const auto positions = read(lease.positions(), count, stream);
                bool are_right = true;
                for (std::size_t i = 0; i < count; ++i)
                    are_right = are_right && found[static_cast<std::size_t>(positions[i])] == ids[i];
                CHECK(are_right);
                std::vector<std::byte> expected(different.size() * 24);
                table.read_weights(found, expected);
                std::vector<std::byte> rows;
                const auto records =
                    to_host(lease.weights(), different.size() * lease.stride_bytes(), stream);
                for (std::size_t row = 0; row < different.size(); ++row) {
                    const auto begin =
                        records.begin() + static_cast<std::ptrdiff_t>(row * lease.stride_bytes());
                    rows.insert(rows.end(), begin, begin + 24);
                }
                CHECK(rows == expected);
                CHECK_THROWS_AS(lease.ids(), unsupported);
            }
        }
    });
}

TEST_CASE("embedding table: steps with ids in device memory and in host memory give the same bits") {
    on_each_device([&](const device& device) {
        std::mt19937_64 random(2);
        for (const std::uint64_t device_rows : {0U, 100U, 3000U}) {
            CAPTURE(device_rows);
            embedding_options options = options_for(3000, 10'000);
            options.look_ahead = 2;
            embedding_table expected(options, device);
            options.device_rows = device_rows;
            embedding_table table(options, device);
            const stream stream(device);
            for (int step = 0; step < 8; ++step) {
                // one lease is committed while another one of common rows is held
                std::vector<embedding_lease> leases;
                std::vector<std::vector<std::uint64_t>> ids;
                for (int i = 0; i < 2; ++i) {
                    ids.push_back(random_ids(3000, 1 + random() % 10'000, random));
                    const device_array<std::uint64_t> sent(ids.back(), stream);
                    leases.push_back(step % 3 == 0 && i == 0 ? table.fetch(ids.back(), stream)
                                                             : table.fetch(sent.ids(), stream));
                }
                for (std::size_t i = 0; i < 2; ++i) {
                    std::vector<float> values(ids[i].size() * options.columns);
                    for (float& value : values)
                        value = static_cast<float>(random() % 1000) / 500 - 1;
                    const device_array<float> gradients(values, stream);
                    table.commit(std::move(leases[i]), gradients.data(), dtype::of<float>(), stream);
                    expected.commit(expected.fetch(ids[i], stream), gradients.data(), dtype::of<float>(),
                                    stream);
                    stream.synchronize();
                }
            }
            CHECK(weights_of(table) == weights_of(expected));
        }
    });
}

TEST_CASE("embedding table: wrong ids in device memory move nothing, and the error is thrown once" *
          blocks_a_stream) {
    on_each_device([&](const device& device) {
        embedding_options options = options_for(100, 5000);
        options.device_rows = 10;
        embedding_table table(options, device);
        const std::vector<std::byte> before = weights_of(table);
        const stream stream(device);
        std::vector<std::int64_t> wrong(5000, 3);
        wrong[4321] = -1;
        wrong[4400] = 100;
        const device_array<std::int64_t> sent(wrong, stream);
        const device_array<float> gradients(std::vector<float>(5000 * options.columns, 1), stream);
        const char* const sentence =
            "2 of 5000 ids in device memory were outside the embedding table of 100 rows; "
            "the first is ids[4321] = -1.";

        embedding_lease lease = table.fetch(sent.ids(), stream);
        CHECK(read(lease.device_row_count(), 1, stream).front() == 0);
        CHECK(read(lease.positions(), 5000, stream) == std::vector<std::int64_t>(5000));
        CHECK_THROWS_WITH_AS(table.commit(std::move(lease), gradients.data(), dtype::of<float>(), stream),
                             doctest::Contains(sentence), invalid_argument);
        table.synchronize();

        // the commit of a fetch that the device has not reached changes nothing, and a later call throws
        const gate gate;
        hold(stream, gate);
        lease = table.fetch(sent.ids(), stream);
        table.commit(std::move(lease), gradients.data(), dtype::of<float>(), stream);
        gate.open();
        stream.synchronize();
        CHECK_THROWS_WITH_AS(table.synchronize(), doctest::Contains(sentence), invalid_argument);
        table.synchronize();
        CHECK(weights_of(table) == before);

        // the error of a lease that was dropped
        static_cast<void>(table.fetch(sent.ids(), stream));
        stream.synchronize();
        const std::vector<std::uint64_t> right{1, 2};
        CHECK_THROWS_WITH_AS(table.fetch(right, stream), doctest::Contains(sentence), invalid_argument);
        CHECK(table.fetch(right, stream).row_count() == 2);

        static_cast<void>(table.fetch(sent.ids(), stream));
        CHECK_THROWS_WITH_AS(table.synchronize(), doctest::Contains(sentence), invalid_argument);

        lease = table.fetch(sent.ids(), stream);
        stream.synchronize();
        CHECK_THROWS_WITH_AS(table.write_back(std::move(lease), stream), doctest::Contains(sentence),
                             invalid_argument);
        CHECK(weights_of(table) == before);
    });
}

TEST_CASE("embedding table: one wrong id among many in device memory is found") {
    on_each_device([&](const device& device) {
        embedding_table table(options_for(100, 300'000), device);
        const stream stream(device);
        std::vector<std::uint64_t> ids(300'000, 99);
        ids[299'999] = 100;
        const device_array<std::uint64_t> sent(ids, stream);
        const embedding_lease lease = table.fetch(sent.ids(), stream);
        CHECK(read(lease.device_row_count(), 1, stream).front() == 0);
        CHECK_THROWS_WITH_AS(table.synchronize(), doctest::Contains("the first is ids[299999] = 100"),
                             invalid_argument);
    });
}

TEST_CASE("embedding table: rows of ids in device memory are written back, also after the table has grown") {
    on_each_device([&](const device& device) {
        embedding_options options = options_for(50, 10);
        options.device_rows = 50;
        embedding_table table(options, device);
        const stream stream(device);
        const device_array<std::uint64_t> first({40, 3, 40}, stream);
        static_cast<void>(table.fetch(first.ids(), stream));
        table.grow(80);
        const std::vector<std::byte> before = weights_of(table);
        const device_array<std::uint64_t> ids({79, 3, 79, 60}, stream);
        embedding_lease lease = table.fetch(ids.ids(), stream);
        const device_array<float> weights({1, 2, 3, 4, 5, 6}, stream);
        const auto set = [&](std::uint64_t row) {
            const auto row_bytes = to_host(weights.data(), 24, stream);
            copy_to_device_async(lease.weights() + row * lease.stride_bytes(), row_bytes, stream);
            stream.synchronize();
        };
        set(0);
        set(2);
        table.write_back(std::move(lease), stream);
        std::vector<std::byte> expected = before;
        for (const std::size_t row : {3U, 79U}) {
            const auto row_bytes = to_host(weights.data(), 24, stream);
            std::ranges::copy(row_bytes, expected.begin() + static_cast<std::ptrdiff_t>(row * 24));
        }
        CHECK(weights_of(table) == expected);
    });
}

TEST_CASE("embedding table: leases of ids in device memory on two streams commit in turn") {
    on_each_device([&](const device& device) {
        embedding_options options = options_for(300, 500);
        options.look_ahead = 1;
        embedding_table expected(options, device);
        embedding_table table(options, device);
        const stream streams[2] = {stream(device), stream(device)};
        std::mt19937_64 random(3);
        const device_array<float> gradients(std::vector<float>(500 * options.columns, 0.5F), streams[0]);
        const std::vector<std::uint64_t> ids = random_ids(300, 500, random);
        const device_array<std::uint64_t> sent(ids, streams[0]);
        for (int step = 0; step < 10; ++step) {
            table.prefetch(ids);
            embedding_lease first = table.fetch(sent.ids(), streams[0]);
            embedding_lease second = table.fetch(sent.ids(), streams[1]);
            table.commit(std::move(second), gradients.data(), dtype::of<float>(), streams[1]);
            table.commit(std::move(first), gradients.data(), dtype::of<float>(), streams[0]);
            table.commit(table.fetch(ids, streams[step % 2]), gradients.data(), dtype::of<float>(),
                         streams[step % 2]);
            for (int i = 0; i < 3; ++i)
                expected.commit(expected.fetch(ids, streams[0]), gradients.data(), dtype::of<float>(),
                                streams[0]);
        }
        CHECK(weights_of(table) == weights_of(expected));
    });
}

TEST_CASE("embedding table: many ids in device memory are fetched while other rows are written back") {
    constexpr std::size_t id_count = sanitized ? 2000 : 160'000;
    on_each_device([&](const device& device) {
        embedding_options options = options_for(id_count, id_count);
        options.look_ahead = 1;
        embedding_table expected(options, device);
        embedding_table table(options, device);
        const stream streams[2] = {stream(device), stream(device)};
        std::mt19937_64 random(4);
        const device_array<float> gradients(std::vector<float>(id_count * options.columns, 0.5F), streams[0]);
        std::vector<std::uint64_t> ids[2];
        std::vector<device_array<std::uint64_t>> sent;
        for (std::size_t i = 0; i < 2; ++i) {
            ids[i] = random_ids(id_count, id_count, random);
            sent.emplace_back(ids[i], streams[0]);
        }
        for (int step = 0; step < 3; ++step) {
            for (std::size_t i = 0; i < 2; ++i) {
                table.commit(table.fetch(sent[i].ids(), streams[i]), gradients.data(), dtype::of<float>(),
                             streams[i]);
                expected.commit(expected.fetch(ids[i], streams[0]), gradients.data(), dtype::of<float>(),
                                streams[0]);
            }
        }
        CHECK(weights_of(table) == weights_of(expected));
    });
}

TEST_CASE("embedding table: only a fetch takes ids in device memory") {
    on_each_device([&](const device& device) {
        embedding_table table(options_for(100, 10), device);
        const stream stream(device);
        const device_array<std::uint64_t> ids({1, 2}, stream);
        std::vector<std::byte> weights(48);
        CHECK_THROWS_AS(table.prefetch(ids.ids()), unsupported);
        CHECK_THROWS_AS(table.read_weights(ids.ids(), weights), unsupported);
        CHECK_THROWS_AS(table.write_weights(ids.ids(), weights), unsupported);
        const std::span<const std::uint64_t> nowhere(static_cast<const std::uint64_t*>(nullptr), 3);
        CHECK_THROWS_AS(table.fetch(nowhere, stream), invalid_argument);
        CHECK_THROWS_AS(table.prefetch(nowhere), invalid_argument);
        CHECK_THROWS_AS(table.read_weights(nowhere, {}), invalid_argument);
        const std::vector<std::uint64_t> first{0};
        const std::uint64_t first_bytes = table.options().columns * sizeof(float);
        CHECK_THROWS_AS(table.read_weights(first, {static_cast<std::byte*>(nullptr), first_bytes}),
                        invalid_argument);
        CHECK_THROWS_AS(table.write_weights(first, {static_cast<const std::byte*>(nullptr), first_bytes}),
                        invalid_argument);
        CHECK_THROWS_AS(table.fetch(row_ids::on_device(nullptr, 1), stream), invalid_argument);
        CHECK_THROWS_AS(table.fetch(row_ids::on_device(ids.data(), 11), stream), invalid_argument);
        CHECK(table.fetch(row_ids::on_device(nullptr, 0), stream).row_count() == 0);
    });
}
