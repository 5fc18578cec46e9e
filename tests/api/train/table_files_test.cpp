#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "devices.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "pinflow/train/embedding_table.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

namespace {

constexpr std::uint64_t max_ids = 40;

embedding_options options_for(std::uint64_t rows, std::uint64_t device_rows = 0) {
    embedding_options options;
    options.row_count = rows;
    options.columns = 6;
    options.rule = adam{};
    options.weights = normal_weights(0, 1, 4);
    options.max_batch_ids = max_ids;
    options.device_rows = device_rows;
    return options;
}

std::vector<std::uint64_t> all_ids(const embedding_table& table) {
    std::vector<std::uint64_t> ids(table.options().row_count);
    std::iota(ids.begin(), ids.end(), std::uint64_t{0});
    return ids;
}

std::vector<std::byte> weights_of(embedding_table& table) {
    const auto ids = all_ids(table);
    const embedding_options& options = table.options();
    std::vector<std::byte> weights(ids.size() * options.columns * options.type.size_bytes());
    table.read_weights(ids, weights);
    return weights;
}

/// Makes steps with random ids and gradients that depend on the seed alone.
void train(embedding_table& table, unsigned seed, int steps, std::uint64_t max_id) {
    std::mt19937_64 random(seed);
    std::uniform_int_distribution<std::uint64_t> id(0, max_id);
    std::normal_distribution<float> number;
    const stream stream(table.device());
    for (int step = 0; step < steps; ++step) {
        std::vector<std::uint64_t> ids(max_ids);
        for (std::uint64_t& each : ids)
            each = id(random);
        std::vector<float> gradients(ids.size() * table.options().columns);
        for (float& each : gradients)
            each = number(random);
        device_buffer on_device(gradients.size() * sizeof(float), stream);
        copy_to_device_async(on_device.data(), std::as_bytes(std::span(gradients)), stream);
        table.commit(table.fetch(ids, stream), on_device.data(), dtype::of<float>(), stream);
        stream.synchronize();
    }
}

std::vector<std::byte> bytes_of(const array& array) {
    const array_view& view = array.view();
    return {view.data(), view.data() + view.size_bytes()};
}

}  // namespace

TEST_CASE("embedding table: records are padded to multiples of 64 bytes if that costs at most an eighth") {
    const auto size_of = [](std::uint64_t columns, const optimizer& rule, const char* type) {
        embedding_options options;
        options.row_count = 1;
        options.columns = columns;
        options.rule = rule;
        options.type = dtype::parse(type);
        return embedding_table::record_size_bytes(options);
    };
    CHECK(size_of(128, adam{}, "<f4") == 1600);            // 1552 with all parts
    CHECK(size_of(64, adam{}, "<f4") == 832);              // 784
    CHECK(size_of(128, sgd{}, "<f2") == 272);              // 320 would be a sixth more
    CHECK(size_of(4, sgd{}, "<f4") == 32);                 // a row and its steps
    CHECK(size_of(8, sgd{}, "<f4") == 48);                 // 64 would be a third more
    CHECK(size_of(112, rowwise_adagrad{}, "<f4") == 512);  // 480
}

TEST_CASE(
    "embedding table: a loaded table trains to the same bits as the saved table, for any number of device "
    "rows") {
    const temporary_folder folder;
    on_each_device([&](const device& device) {
        for (const bool is_rowwise : {false, true}) {
            embedding_options options = options_for(500, 70);
            if (is_rowwise) options.rule = rowwise_adagrad{};
            embedding_table first(options, device);
            train(first, 1, 5, 499);
            first.save(folder / "table");
            train(first, 2, 5, 499);
            for (const std::uint64_t device_rows : {0U, 70U, 500U}) {
                CAPTURE(device_rows);
                options.device_rows = device_rows;
                options.weights = nullptr;
                embedding_table second(options, device);
                train(second, 9, 2, 499);  // all of this is replaced
                const std::vector<std::uint64_t> ids{3, 4};
                second.prefetch(ids);
                second.load(folder / "table");
                train(second, 2, 5, 499);
                CHECK(weights_of(second) == weights_of(first));
            }
        }
    });
}

TEST_CASE("embedding table: a saved one has weights, states and steps as tensors") {
    const temporary_folder folder;
    embedding_table table(options_for(50), device::host());
    train(table, 1, 3, 20);
    table.save(folder / "table");
    CHECK(bytes_of(open_safetensors(folder / "table", "weights")) == weights_of(table));
    CHECK(open_safetensors(folder / "table", "exp_avg").shape() == shape_vector{50, 6});
    const std::vector<std::byte> bytes = bytes_of(open_safetensors(folder / "table", "step"));
    std::vector<std::uint32_t> steps(50);
    REQUIRE(bytes.size() == 50 * sizeof(std::uint32_t));
    std::memcpy(steps.data(), bytes.data(), bytes.size());
    CHECK(*std::ranges::max_element(steps) == 3);
    CHECK(steps[49] == 0);  // not trained
}

TEST_CASE("embedding table: a file of another rule, type or shape is refused, and nothing changes") {
    const temporary_folder folder;
    embedding_table saved(options_for(50), device::host());
    saved.save(folder / "table");
    const auto refuses = [&](const embedding_options& options) {
        embedding_table table(options, device::host());
        const auto before = weights_of(table);
        CHECK_THROWS_AS(table.load(folder / "table"), state_mismatch);
        CHECK(weights_of(table) == before);
    };
    embedding_options other = options_for(51);
    refuses(other);
    other = options_for(50);
    other.columns = 7;
    refuses(other);
    other = options_for(50);
    other.type = dtype::parse("<f2");
    refuses(other);
    other = options_for(50);
    other.rule = adamw{};
    refuses(other);
    write_npy(folder / "x.npy", array_view(nullptr, dtype::of<float>(), {0, 6}));
    CHECK_THROWS_AS(saved.load(folder / "x.npy"), format_error);
    CHECK_THROWS_AS(saved.load(folder / "missing"), system_failure);
}

TEST_CASE("embedding table: weights are exported to a .npy file, imported from it, and cast from float64") {
    const temporary_folder folder;
    on_each_device([&](const device& device) {
        embedding_table table(options_for(300, 40), device);
        train(table, 1, 3, 299);
        table.export_weights(folder / "weights.npy");
        CHECK(open_npy(folder / "weights.npy").shape() == shape_vector{300, 6});
        CHECK(bytes_of(open_npy(folder / "weights.npy")) == weights_of(table));

        embedding_options options = options_for(300, 300);
        options.weights = nullptr;
        embedding_table copy(options, device);
        copy.import_weights(folder / "weights.npy");
        CHECK(weights_of(copy) == weights_of(table));

        std::vector<double> doubles(300 * 6);
        std::iota(doubles.begin(), doubles.end(), -7.0);
        write_npy(folder / "doubles.npy", array_view(reinterpret_cast<const std::byte*>(doubles.data()),
                                                     dtype::of<double>(), {300, 6}));
        copy.import_weights(folder / "doubles.npy");
        const std::vector<float> floats(doubles.begin(), doubles.end());
        const auto expected = std::as_bytes(std::span(floats));
        CHECK(weights_of(copy) == std::vector(expected.begin(), expected.end()));

        embedding_table longer(options_for(301), device);
        CHECK_THROWS_AS(longer.import_weights(folder / "weights.npy"), invalid_argument);
    });
}

TEST_CASE("embedding table: write_weights replaces weights, and optimizer states and steps stay") {
    on_each_device([&](const device& device) {
        embedding_table trained(options_for(100, 30), device);
        embedding_table fresh(options_for(100, 30), device);
        train(trained, 5, 3, 99);
        const std::vector<std::uint64_t> ids = all_ids(trained);
        const std::vector<float> rows(100 * 6, 1.0F);
        const auto weights = std::as_bytes(std::span(rows));
        for (embedding_table* const each : {&trained, &fresh})
            each->write_weights(ids, weights);
        REQUIRE(weights_of(trained) == weights_of(fresh));
        for (embedding_table* const each : {&trained, &fresh})
            train(*each, 1, 1, 99);
        CHECK(weights_of(trained) != weights_of(fresh));
        // the same states as in a table that was trained alike and has the same weights
        embedding_table other(options_for(100, 30), device);
        train(other, 5, 3, 99);
        other.write_weights(ids, weights);
        train(other, 1, 1, 99);
        CHECK(weights_of(trained) == weights_of(other));
    });
}

TEST_CASE(
    "embedding table: write_weights replaces rows, also prefetched rows, and is refused while a lease is "
    "held") {
    on_each_device([&](const device& device) {
        embedding_table table(options_for(100, 30), device);
        const std::vector<std::uint64_t> ids{99, 2, 31, 2};
        std::vector<float> rows(ids.size() * 6);
        std::iota(rows.begin(), rows.end(), 0.0F);
        const std::vector<std::uint64_t> later{2, 31};
        table.prefetch(later);
        table.write_weights(ids, std::as_bytes(std::span(rows)));
        std::vector<float> read(3 * 6);
        const std::vector<std::uint64_t> different{2, 31, 99};
        table.read_weights(different, std::as_writable_bytes(std::span(read)));
        CHECK(read == std::vector<float>{18, 19, 20, 21, 22, 23, 12, 13, 14, 15, 16, 17, 0, 1, 2, 3, 4, 5});
        CHECK_THROWS_AS(table.write_weights(different, std::as_bytes(std::span(rows))), invalid_argument);
        const std::vector<std::uint64_t> outside{100};
        CHECK_THROWS_AS(table.write_weights(outside, std::as_bytes(std::span(rows)).first(24)),
                        invalid_argument);
        // not the rows that were prefetched before
        const stream stream(device);
        const embedding_lease lease = table.fetch(later, stream);
        std::vector<float> row(6);
        copy_to_host_async(std::as_writable_bytes(std::span(row)), lease.weights(), stream);
        stream.synchronize();
        CHECK(row == std::vector<float>{18, 19, 20, 21, 22, 23});
        // the rows of a lease would be written back over the new ones
        CHECK_THROWS_AS(table.write_weights(different, std::as_bytes(std::span(read))), invalid_argument);
        stream.synchronize();
    });
}

TEST_CASE("embedding table: a table that grew has the weights of a table that began with all rows") {
    on_each_device([&](const device& device) {
        for (const std::uint64_t device_rows : {0U, 20U, 100U}) {
            CAPTURE(device_rows);
            embedding_table table(options_for(100, device_rows), device);
            embedding_table whole(options_for(1000, device_rows), device);
            for (embedding_table* const each : {&table, &whole})
                train(*each, 1, 4, 99);
            table.grow(100);
            table.grow(400);
            for (embedding_table* const each : {&table, &whole})
                train(*each, 2, 4, 399);
            table.grow(1000);
            CHECK(table.options().row_count == 1000);
            for (embedding_table* const each : {&table, &whole})
                train(*each, 3, 4, 999);
            CHECK(weights_of(table) == weights_of(whole));
            CHECK_THROWS_AS(table.grow(999), invalid_argument);
        }
    });
}

TEST_CASE("embedding table: tables of many pieces, and of one column, pass through files and growth") {
    const temporary_folder folder;
    struct size {
        std::uint64_t rows, columns, device_rows;
    };
    // records of 1,552 bytes, 10,810 in a piece; records of 64 bytes
    for (const size& size : {size{30'000, 128, 12'000}, size{3000, 1, 10}}) {
        on_each_device([&](const device& device) {
            embedding_options options = options_for(size.rows, size.device_rows);
            options.columns = size.columns;
            embedding_table table(options, device);
            train(table, 1, 3, size.rows - 1);
            table.save(folder / "table");
            table.export_weights(folder / "weights.npy");
            embedding_options empty = options;
            empty.weights = nullptr;
            empty.device_rows = size.rows / 2;
            embedding_table loaded(empty, device);
            loaded.load(folder / "table");
            CHECK(weights_of(loaded) == weights_of(table));
            embedding_table imported(empty, device);
            imported.import_weights(folder / "weights.npy");
            CHECK(weights_of(imported) == weights_of(table));
            options.row_count = size.rows / 2;
            embedding_table grown(options, device);
            grown.grow(size.rows);
            options.row_count = size.rows;
            embedding_table whole(options, device);
            CHECK(weights_of(grown) == weights_of(whole));
        });
    }
}

TEST_CASE("embedding table: bfloat16 weights come back from .npy files, where they have no type") {
    const temporary_folder folder;
    embedding_options options = options_for(7);
    options.columns = 3;
    options.type = dtype::parse("bfloat16");
    embedding_table table(options, device::host());
    table.export_weights(folder / "weights.npy");
    table.save(folder / "table");
    CHECK(bytes_of(open_safetensors(folder / "table", "weights")) == weights_of(table));
    options.weights = nullptr;
    embedding_table imported(options, device::host());
    imported.import_weights(folder / "weights.npy");
    CHECK(weights_of(imported) == weights_of(table));
    options.type = dtype::of<float>();
    embedding_table other(options, device::host());
    CHECK_THROWS_AS(other.import_weights(folder / "weights.npy"), unsupported);
}

TEST_CASE("embedding table: load, import_weights and grow are refused while leases are held") {
    const temporary_folder folder;
    on_each_device([&](const device& device) {
        embedding_table table(options_for(50), device);
        table.save(folder / "table");
        table.export_weights(folder / "weights.npy");
        const stream stream(device);
        const std::vector<std::uint64_t> ids{1, 2};
        {
            const embedding_lease lease = table.fetch(ids, stream);
            CHECK_THROWS_AS(table.load(folder / "table"), invalid_argument);
            CHECK_THROWS_AS(table.import_weights(folder / "weights.npy"), invalid_argument);
            CHECK_THROWS_AS(table.grow(60), invalid_argument);
        }
        stream.synchronize();
        table.load(folder / "table");
        table.grow(60);
        CHECK(table.options().row_count == 60);
    });
}

TEST_CASE("embedding table: one in storage of the caller does not grow") {
    embedding_options options = options_for(10);
    const pinned_buffer memory(10 * embedding_table::record_size_bytes(options), device::host());
    options.storage.emplace(memory.bytes(), embedding_table::record_size_bytes(options));
    embedding_table table(options, device::host());
    CHECK_THROWS_AS(table.grow(20), unsupported);
    CHECK(table.options().row_count == 10);
}
