#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "pinflow/train/embedding_table.hpp"
#include "src/core/cast.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/plain_embedding_table.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/sanitized.hpp"

// Embedding tables compared with a plain loop, bit for bit.

using namespace pinflow;

namespace {

std::vector<optimizer> all_rules() {
    std::vector<optimizer> rules{sgd{.rate = 0.1},
                                 sgd{.rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
                                 adagrad{},
                                 rowwise_adagrad{.rate_decay = 0.1, .weight_decay = 0.01, .initial_sum = 0.5},
                                 adadelta{},
                                 rmsprop{},
                                 rmsprop{.momentum = 0.5, .centered = true},
                                 rprop{},
                                 adam{},
                                 adam{.weight_decay = 0.1, .amsgrad = true},
                                 adamw{},
                                 adamax{},
                                 nadam{},
                                 radam{},
                                 asgd{},
                                 sparse_adam{}};
    return rules;
}

/// A random program of prefetches, fetches, commits and dropped leases, compared with the plain table.
void check_program(const device& device, embedding_options options, std::mt19937_64& random, int steps) {
    plain_table expected(options);
    embedding_table table(options, device);
    const stream stream(device);
    std::deque<device_array> kept;
    std::deque<std::vector<std::uint64_t>> upcoming;
    std::vector<std::pair<embedding_lease, std::vector<std::uint64_t>>> leases;
    for (int step = 0; step < steps; ++step) {
        while (upcoming.size() < options.look_ahead && random() % 4 != 0) {
            upcoming.push_back(random_ids(random, options.row_count, random() % (options.max_batch_ids + 1)));
            table.prefetch(upcoming.back());
        }
        if (upcoming.empty() || random() % 8 == 0) {
            auto ids = random_ids(random, options.row_count, 1 + random() % options.max_batch_ids);
            row_ids fetched = ids;
            if (random() % 2 == 0) {
                kept.emplace_back(ids, stream);
                fetched = row_ids::on_device(kept.back().data(), ids.size());
            }
            leases.emplace_back(table.fetch(fetched, stream), std::move(ids));
        } else {
            leases.emplace_back(table.fetch(upcoming.front(), stream), upcoming.front());
            upcoming.pop_front();
        }
        if (random() % 8 == 0) leases.erase(leases.begin());  // dropped
        if (random() % 8 == 0 && leases.size() == 1)
            continue;  // another one is fetched before this is committed
        while (!leases.empty()) {
            auto [lease, committed] = std::move(leases.back());
            leases.pop_back();
            const auto values = random_gradients(random, committed.size() * options.columns);
            expected.step(committed, values);
            kept.emplace_back(values, stream);
            table.commit(std::move(lease), kept.back().data(), dtype::of<float>(), stream);
        }
    }
    leases.clear();
    const auto ids = all_ids(options.row_count);
    CHECK(weights_of(table, ids) == expected.weights_of(ids));
    stream.synchronize();
}

/// How many random programs run on a device. PINFLOW_TEST_PROGRAMS sets another number.
int random_programs() {
    const char* const asked = std::getenv("PINFLOW_TEST_PROGRAMS");
    return asked == nullptr ? (sanitized ? 300 : 2000) : std::atoi(asked);
}

}  // namespace

TEST_CASE("embedding table: every rule gives the bits of a loop over single rows") {
    on_each_device([&](const device& device) {
        std::mt19937_64 random(27);
        for (const optimizer& rule : all_rules()) {
            for (const char* const type : {"<f4", "<f2", "bfloat16"}) {
                CAPTURE(rule_name(rule));
                CAPTURE(type);
                embedding_options options;
                options.row_count = 50;
                options.columns = 1 + random() % 300;
                options.type = dtype::parse(type);
                options.rule = rule;
                options.weights = normal_weights(0, 1, random());
                options.max_batch_ids = 60;
                options.look_ahead = 1;
                check_program(device, options, random, 12);
            }
        }
    });
}

TEST_CASE(
    "embedding table: random programs give the same bits for any look-ahead and number of device rows") {
    on_each_device([&](const device& device) {
        std::mt19937_64 random(2700);
        for (int program = 0; program < random_programs(); ++program) {
            embedding_options options;
            options.row_count = 1 + random() % 200;
            options.columns = 1 + random() % 40;
            options.rule = random() % 2 == 0 ? optimizer(adam{}) : optimizer(adagrad{});
            options.weights = uniform_weights(-1, 1, random());
            options.max_batch_ids = 1 + random() % 100;
            options.look_ahead = static_cast<unsigned>(random() % 5);
            options.device_rows = random() % 3 == 0 ? 0 : random() % (options.row_count + 1);
            CAPTURE(program);
            check_program(device, options, random, 10);
        }
    });
}

TEST_CASE("embedding table: random programs give the same bits if the GPU or other threads group the ids") {
    const auto run = [&](const device& device) {
        std::mt19937_64 random(8192);
        for (int program = 0; program < random_programs() / 100; ++program) {
            embedding_options options;
            options.row_count = 1 + random() % 3000;
            options.columns = 1 + random() % 3;
            options.weights = uniform_weights(-1, 1, random());
            options.max_batch_ids = 20'000;  // 3 of 5 prefetches have 8192 ids or more
            options.look_ahead = static_cast<unsigned>(1 + random() % 4);
            options.device_rows = random() % (options.row_count + 1);
            CAPTURE(program);
            check_program(device, options, random, 10);
        }
    };
    on_each_device(run);
    if (sanitized) return;  // a GPU gathers rows that are being written, and they are replaced later
    fake_cuda_backend backend;
    run(backend.device());
}

TEST_CASE("embedding table: frequent ids give the bits of a loop for each type of gradients") {
    on_each_device([&](const device& device) {
        std::mt19937_64 random(128);
        for (const char* const name : {"<f4", "<f2", "bfloat16"}) {
            for (const std::uint64_t columns : {1U, 6U, 128U, 300U}) {
                CAPTURE(name);
                CAPTURE(columns);
                const dtype type = dtype::parse(name);
                embedding_options options;
                options.row_count = 40;
                options.columns = columns;
                options.weights = normal_weights(0, 1, random());
                options.max_batch_ids = 5000;
                embedding_table table(options, device);
                plain_table expected(options);
                const stream stream(device);
                // some ids 2,000, some 128, 127 and 1 times
                std::vector<std::uint64_t> ids(2000, 7);
                ids.insert(ids.end(), 2000, 8);
                ids.insert(ids.end(), 128, 0);
                ids.insert(ids.end(), 127, 1);
                ids.push_back(39);
                std::ranges::shuffle(ids, random);
                for (int step = 0; step < 2; ++step) {
                    auto values = random_gradients(random, ids.size() * columns);
                    std::vector<std::byte> stored(values.size() * type.size_bytes());
                    detail::cast_elements(dtype::of<float>(),
                                          reinterpret_cast<const std::byte*>(values.data()), type,
                                          stored.data(), values.size());
                    detail::cast_elements(type, stored.data(), dtype::of<float>(),
                                          reinterpret_cast<std::byte*>(values.data()), values.size());
                    const device_array gradients(stored, stream);
                    table.commit(table.fetch(ids, stream), gradients.data(), type, stream);
                    expected.step(ids, values);
                    stream.synchronize();
                }
                CHECK(weights_of(table, all_ids(40)) == expected.weights_of(all_ids(40)));
            }
        }
        // more rows than all blocks of a GPU look at in one round
        embedding_options options;
        options.row_count = 90'000;
        options.columns = 1;
        options.max_batch_ids = 100'000;
        options.look_ahead = 0;
        embedding_table table(options, device);
        plain_table expected(options);
        const stream stream(device);
        std::vector<std::uint64_t> ids = all_ids(options.row_count);
        ids.insert(ids.end(), 5000, 5);
        ids.insert(ids.end(), 5000, 89'999);
        const auto values = random_gradients(random, ids.size());
        const device_array gradients(values, stream);
        table.commit(table.fetch(ids, stream), gradients.data(), dtype::of<float>(), stream);
        expected.step(ids, values);
        CHECK(weights_of(table, all_ids(options.row_count)) ==
              expected.weights_of(all_ids(options.row_count)));
    });
}
