#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "digest_formula.hpp"
#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/loader/state.hpp"
#include "samples.hpp"
#include "temporary_folder.hpp"

// Resuming with several arrays, by another route and in batches of another size. resume_test has every order
// and one to four ranks, with numbered rows.
using namespace pinflow;

namespace {

constexpr std::uint64_t row_count = 211;
constexpr std::uint64_t epochs = 2;

/// What one loader delivered: its rows in their order, over all epochs.
struct part {
    row_list rows;
    std::uint64_t digest = 0;
    loader_state end;
};

/// Takes `max_batches` batches of `sample`, or all that are left.
part take(const known_sample& sample, const loader_options& options,
          std::optional<std::uint64_t> max_batches = std::nullopt) {
    loader loader(sources_of(sample), options);
    const stream stream(options.device);
    digest digest(options.device);
    part part;
    for (std::uint64_t i = 0; !max_batches || i < *max_batches; ++i) {
        const auto batch = loader.next(stream);
        if (!batch) break;
        CHECK(batch->row_count() <= options.batch_rows);
        CHECK(holds_rows_of(sample, *batch, stream));
        digest.add_async(*batch, stream);
        part.rows.insert(part.rows.end(), batch->row_ids().begin(), batch->row_ids().end());
    }
    part.digest = digest.value();
    part.end = loader_state::from_json(loader.state().to_json());
    return part;
}

}  // namespace

TEST_CASE("resume: after an interruption the rest comes in its order, in batches of any size, by any route") {
    std::mt19937_64 random(30);
    const temporary_folder folder;
    const known_sample sample{npy_file(folder / "images.npy", "|u1", {row_count, 3, 32, 32}, random),
                              npy_file(folder / "labels.npy", "<i8", {row_count}, random)};
    const std::uint64_t expected = epochs * expected_digest(sample);
    on_each_device([&](const device& device) {
        for (const order order : every_plain_order) {
            const auto routes = routes_of(sample, device, order);
            for (std::size_t i = 0; i < routes.size(); ++i) {
                for (const std::uint64_t next_batch_rows : {1U, 10U, 64U, 300U}) {
                    loader_options options = options_for(device, order);
                    options.batch_rows = 37;
                    options.epochs = epochs;
                    options.route = routes[i];
                    options.slots = 3;
                    row_list all;
                    for (std::uint64_t epoch = 0; epoch < epochs; ++epoch) {
                        const row_list rows = epoch_of(sampler_of(options, row_count), epoch);
                        all.insert(all.end(), rows.begin(), rows.end());
                    }
                    const std::uint64_t max_batches = random() % 12;
                    INFO("first " << max_batches << " batches by route " << to_string(routes[i]) << ", order "
                                  << to_string(order) << ", then batches of " << next_batch_rows);
                    const part first = take(sample, options, max_batches);
                    options.resume_from = first.end;
                    options.batch_rows = next_batch_rows;
                    options.route = routes[(i + 1) % routes.size()];
                    const part second = take(sample, options);
                    row_list delivered = first.rows;
                    delivered.insert(delivered.end(), second.rows.begin(), second.rows.end());
                    CHECK(delivered == all);
                    CHECK(first.digest + second.digest == expected);
                    CHECK(second.end.epoch == epochs);
                    CHECK(second.end.position == 0);
                }
            }
        }
    });
}

TEST_CASE("resume: a loader may be interrupted after every batch") {
    std::mt19937_64 random(31);
    const temporary_folder folder;
    const known_sample sample{npy_file(folder / "rows.npy", "<f4", {row_count, 30}, random),
                              rows_of_own(row_count, 5, random)};
    on_each_device([&](const device& device) {
        loader_options options = options_for(device, order::shuffled);
        options.slots = 2;
        row_list delivered;
        std::uint64_t sum = 0;
        while (delivered.size() < row_count) {
            options.batch_rows = 1 + random() % 40;
            const part part = take(sample, options, 1);
            REQUIRE_FALSE(part.rows.empty());
            delivered.insert(delivered.end(), part.rows.begin(), part.rows.end());
            sum += part.digest;
            options.resume_from = part.end;
        }
        CHECK(delivered == epoch_of(sampler::shuffled(row_count, options.seed), 0));
        CHECK(sum == expected_digest(sample));
    });
}
